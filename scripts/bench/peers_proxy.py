"""A way that is long: a TCP proxy, in a process of its own, that passes every byte on some time after it came."""
import multiprocessing
import os
import selectors
import signal
import socket
import statistics
import threading
import time
from collections import deque
from contextlib import contextmanager

PIECE = 1 << 20


class Direction:
    """The bytes that go one way through one connection, each piece with when it is due; b"" is the end."""

    def __init__(self, source, sink):
        self.source, self.sink, self.waiting, self.ended, self.blocked, self.done = source, sink, deque(), False, False, False

    def receive(self, delay):
        try:
            data = self.source.recv(PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.ended = not data
        self.waiting.append((time.monotonic() + delay, memoryview(data)))

    def send(self):
        """Sends what is due."""
        self.blocked = False
        while self.waiting and self.waiting[0][0] <= time.monotonic():
            due, data = self.waiting.popleft()
            try:
                if not data:
                    self.done = True
                    self.sink.shutdown(socket.SHUT_WR)
                elif (sent := self.sink.send(data)) < len(data):
                    self.waiting.appendleft((due, data[sent:]))
            except BlockingIOError:
                self.waiting.appendleft((due, data))
                self.blocked = True
                return
            except OSError:  # who should get it is gone
                self.waiting.clear()
                self.ended = self.done = True


class Proxy:
    """One thread, and select() because its timeouts are finer than a millisecond."""

    def __init__(self, listener, target, delay):
        self.listener, self.target, self.delay, self.directions = listener, target, delay, []
        self.selector = selectors.SelectSelector()

    def accept(self):
        try:
            here, _ = self.listener.accept()
        except BlockingIOError:
            return
        try:
            there = socket.create_connection(self.target)
        except OSError:
            here.close()
            return
        for one in (here, there):
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.directions.append((Direction(here, there), Direction(there, here)))

    def wait(self):
        """Until there is something to do; what can be received from."""
        wanted = {self.listener: selectors.EVENT_READ}
        due = [time.monotonic() + 1]
        for one in (one for both in self.directions for one in both):
            if not one.ended:
                wanted[one.source] = wanted.get(one.source, 0) | selectors.EVENT_READ
            if one.blocked:
                wanted[one.sink] = wanted.get(one.sink, 0) | selectors.EVENT_WRITE
            elif one.waiting:
                due.append(one.waiting[0][0])
        known = self.selector.get_map()
        for key in [key for key in known.values() if key.fileobj not in wanted]:
            self.selector.unregister(key.fileobj)
        for sock, events in wanted.items():
            if sock not in known:
                self.selector.register(sock, events)
            elif known[sock].events != events:
                self.selector.modify(sock, events)
        ready = self.selector.select(max(0, min(due) - time.monotonic()))
        return {key.fileobj for key, events in ready if events & selectors.EVENT_READ}

    def run(self):
        parent = os.getppid()
        while os.getppid() == parent:
            ready = self.wait()
            if self.listener in ready:
                self.accept()
            for one in (one for both in self.directions for one in both):
                if one.source in ready and not one.ended:
                    one.receive(self.delay)
                one.send()
            for both in [both for both in self.directions if all(one.done for one in both)]:
                self.directions.remove(both)
                for one in both:
                    if one.source in self.selector.get_map():
                        self.selector.unregister(one.source)
                    one.source.close()


def work(listener, target, delay):
    # Its parent ends it, by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Proxy(listener, target, delay).run()


@contextmanager
def proxy(port, delay):
    """The port of a proxy to a port of this machine."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        listener.setblocking(False)
        work_on = (listener, ("127.0.0.1", port), delay)
        process = multiprocessing.get_context("fork").Process(target=work, args=work_on, daemon=True)
        process.start()
        try:
            yield listener.getsockname()[1]
        finally:
            process.terminate()
            process.join()


def tried(delay, size=200 << 20):
    """What the proxy does by itself: median milliseconds there and back, and MB/s from a sender that fills it."""

    def answer(listener):
        with listener.accept()[0] as peer:
            for _ in range(21):
                peer.sendall(peer.recv(1))
            block, left = bytes(PIECE), size
            while left:
                left -= peer.send(block[: min(left, PIECE)])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        with proxy(listener.getsockname()[1], delay) as port:
            thread = threading.Thread(target=answer, args=(listener,), daemon=True)
            thread.start()
            with socket.create_connection(("127.0.0.1", port)) as way:
                took = []
                for _ in range(21):
                    begin = time.perf_counter()
                    way.sendall(b"?")
                    way.recv(1)
                    took.append(time.perf_counter() - begin)
                begin, left = time.perf_counter(), size
                while left:
                    left -= len(way.recv(PIECE)) or left
                seconds = time.perf_counter() - begin
            thread.join()
    return statistics.median(took) * 1e3, size / seconds / 1e6
