"""What peer.py says to a peer, and how: the frames of PROTOCOL.md, the ways to a peer, and what may go wrong with either."""
import collections
import contextlib
import io
import ipaddress
import os
import re
import shlex
import socket
import ssl
import struct
import subprocess
import tempfile
import time

FRAME, UNANSWERED, LINE, TREE = 1 << 20, 32_768, 1 << 20, 256 << 20  # limits of the protocol
PIECE, ON_THEIR_WAY = 1 << 19, 16  # bytes that we ask for by one READ, and how many of those at once
WHOLE, AT_WORK = 120, 6 * 3600  # seconds: within them a frame that began is whole; so long a peer may be at work
HELLO, STILL, REFS, LOG, OBJECT, RECORDS, READ, CHECK = 0x01, 0x02, 0x10, 0x11, 0x13, 0x15, 0x16, 0x17
REFS_ARE, LOG_IS, MISSING, OBJECT_IS, RECORDS_ARE, BYTES, STATE, FAILED = 0x20, 0x21, 0x24, 0x25, 0x27, 0x29, 0x2A, 0x2F
HELLO_BODY = b"zspace.peer\0" + struct.pack("<HH", 1, 1) + bytes(16) + b"\7peer.py"
KINDS = ("malformed or out of turn", "not supported", "not found", "refused", "damage", "busy", "a limit", "no space", "an error")


class Failure(Exception):
    """The peer cannot be reached, is silent, refuses, or does not keep to the protocol; or anything else."""

    code = 1


class Absent(Failure):
    """The peer has not got it whole, and says so."""


class Wrong(Failure):
    """What the peer sent has not the digest that it must have."""

    code = 3


class Usage(Failure):
    code = 64


def shown(text):
    """A text of others, so that it cannot do anything to a terminal or pretend to be several lines."""
    return "".join(c for c in text if c.isprintable())[:1000]


def varint(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


class Reader:
    """Takes values off bytes or a file, and refuses what nobody who keeps to the format writes."""

    def __init__(self, data):
        self.file = io.BytesIO(data) if isinstance(data, bytes) else data
        self.left = self.file.seek(0, io.SEEK_END)
        self.file.seek(0)

    def need(self, condition, what="a malformed answer"):
        if not condition:
            raise Failure(what)

    def take(self, length):
        self.need(length <= self.left, "an answer that is too short")
        self.left -= length
        return self.file.read(length)

    def rest(self):
        return self.take(self.left)

    def end(self):
        self.need(self.left == 0, "an answer that is too long")

    def u8(self):
        return self.take(1)[0]

    def flag(self):
        value = self.u8()
        self.need(value < 2)
        return bool(value)

    def varint(self):
        value = shift = 0
        while True:
            byte = self.u8()
            value |= (byte & 127) << shift
            if byte < 128:
                self.need(value < 1 << 64 and (byte or not shift))
                return value
            shift += 7
            self.need(shift < 64)

    def count(self, most):
        value = self.varint()
        self.need(value <= most, "more than the protocol allows")
        return value

    def blob(self, most=FRAME):
        return self.take(self.count(most))

    def text(self, most=FRAME):
        return self.blob(most).decode()

    def time(self):
        self.take(8)
        self.need(struct.unpack("<I", self.take(4))[0] < 10**9)


class Peer:
    """A conversation. All ways are sockets to it: a process has one end of a pair of them."""

    def __init__(self, connect, timeout):
        self.timeout = timeout
        self.socket, self.process, self.messages = connect()
        try:
            self.send(HELLO, HELLO_BODY)
            answer = self.receive(HELLO, time.monotonic() + min(timeout, WHOLE))
            answer.need(answer.take(12) == HELLO_BODY[:12], "no greeting of this protocol")
            low, high = struct.unpack("<HH", answer.take(4))
            answer.need(low <= high)
            if not low <= 1 <= high:
                text = b"version 1 alone is spoken here"
                self.send(FAILED, b"\2" + varint(len(text)) + text)
                raise Failure(f"speaks versions {low} to {high} of the protocol, and we 1 alone")
            answer.take(16)
            answer.text(255)
            answer.end()
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.socket.close()
        if self.process:
            try:
                self.process.wait(2)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.messages.close()

    def hung_up(self, error=None):
        """Why nothing more comes: a process says so on its standard error."""
        why = described(error) if isinstance(error, ssl.SSLError) else "hung up"
        if self.process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2)
            self.messages.seek(max(0, self.messages.seek(0, io.SEEK_END) - 1000))
            lines = self.messages.read().decode(errors="replace").strip().splitlines()
            why += ": " + shown(lines[-1]) if lines else ""
        return Failure(why)

    def send(self, kind, body):
        frame = struct.pack("<IB", len(body) + 1, kind) + body
        self.socket.settimeout(self.timeout)
        # Who hung up may have said why: the answer tells.
        with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
            self.socket.sendall(frame)
        return len(frame)

    def exactly(self, length, deadline):
        data, have = bytearray(length), 0
        while have < length:
            left = deadline - time.monotonic()
            try:
                if left <= 0:
                    raise TimeoutError
                self.socket.settimeout(left)
                got = self.socket.recv_into(memoryview(data)[have:])
            except TimeoutError:
                raise Failure("is silent, or too slow") from None
            except OSError as error:
                raise self.hung_up(error) from None
            if not got:
                raise self.hung_up()
            have += got
        return bytes(data)

    def receive(self, expected, deadline=None):
        """The next frame's body, which must be of the type that is expected. Who is at work is waited for."""
        start = time.monotonic()
        while True:
            kind, answer = self.frame(deadline)
            if kind != STILL or answer.left:
                return self.checked(kind, answer, expected)
            if time.monotonic() > start + AT_WORK:
                raise Failure("has been at work for too long")

    def frame(self, deadline):
        first = self.exactly(1, deadline or time.monotonic() + self.timeout)
        deadline = deadline or time.monotonic() + min(self.timeout, WHOLE)
        length = int.from_bytes(first + self.exactly(3, deadline), "little")
        if not 1 <= length <= FRAME:
            raise Failure(f"a frame of {length} bytes")
        return self.exactly(1, deadline)[0], Reader(self.exactly(length - 1, deadline))

    def checked(self, kind, answer, expected):
        if kind == FAILED:
            code, text = answer.u8(), answer.text(1000)
            answer.end()
            answer.need(1 <= code <= len(KINDS))
            raise (Absent if code in (3, 5) else Failure)(f"{KINDS[code - 1]}: {shown(text)}")
        if kind == MISSING and expected in (LOG_IS, OBJECT_IS, RECORDS_ARE, BYTES):
            damaged = answer.flag()
            answer.end()
            raise Absent("is damaged there" if damaged else "is not there")
        answer.need(kind == expected, f"a frame of type {kind:#04x} out of turn")
        return answer

    def ask(self, requests):
        """Sends requests (type, body, type of the answer), several before their answers come; gives the answers in order."""
        requests, on_their_way, unanswered = iter(requests), collections.deque(), 0
        following = next(requests, None)
        while following or on_their_way:
            while following and len(on_their_way) < ON_THEIR_WAY and unanswered + 5 + len(following[1]) <= UNANSWERED:
                length = self.send(*following[:2])
                on_their_way.append((length, following[2]))
                unanswered += length
                following = next(requests, None)
            yield self.receive(on_their_way[0][1])
            unanswered -= on_their_way.popleft()[0]

    def one(self, kind, body, expected):
        return next(self.ask([(kind, body, expected)]))


def run(command):
    ours, theirs = socket.socketpair()
    messages = tempfile.TemporaryFile()
    with theirs:
        return ours, subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=messages), messages


def here(directory):
    if not os.path.isdir(directory):  # serve would make a store
        raise Failure(f"no store in {directory}")
    return run([os.environ.get("ZSPACE_BIN") or "zspace", "--store", directory, "serve", "--stdio"])


def with_unix(path, timeout):
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(timeout)
    made.connect(path)
    return made, None, None


def with_tls(directory, host, port, timeout):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # peers.pem names peers, not only who signs for them
    cert, key, peers = (os.path.join(directory, name) for name in ("cert.pem", "key.pem", "peers.pem"))
    context.load_cert_chain(cert, key)
    context.load_verify_locations(peers)
    context.set_alpn_protocols(["zspace/1"])
    made = context.wrap_socket(socket.create_connection((host, port), timeout), server_hostname=host)
    if made.selected_alpn_protocol() != "zspace/1":
        raise Failure("does not speak zspace/1 with TLS")
    return made, None, None


def way(peer, options):
    """A function that connects to a peer. Wrong words are told before anybody is asked."""
    kind, colon, rest = peer.partition(":")
    if colon and kind == "unix" and rest:
        return lambda: with_unix(rest, options.timeout)
    if colon and kind in ("tcp", "tls"):
        found = re.fullmatch(r"\[?([^\[\]]+)\]?:([0-9]{1,5})", rest)
        if not found or not 0 < int(found[2]) < 65536:
            raise Usage(f"{peer}: {kind}:HOST:PORT is needed")
        host, port = found[1], int(found[2])
        if kind == "tls":
            if not options.tls:
                raise Usage(f"{peer}: --tls DIR or $ZSPACE_TLS is needed")
            return lambda: with_tls(options.tls, host, port, options.timeout)
        # The name "localhost" means what the machine's files say: only an address is sure.
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host).is_loopback:
                return lambda: (socket.create_connection((host, port), options.timeout), None, None)
        raise Usage(f"{peer}: plain TCP is for a loopback address such as 127.0.0.1; use tls: or ssh")
    if kind == "ssh" and rest.startswith("//"):
        host, _, rest = rest[2:].partition("/")
        host, colon, number = host.partition(":")
        if colon and not number.isdecimal():
            raise Usage(f"{peer}: write ssh://[USER@]HOST[:PORT]/DIR")
        directory = rest[2:] if rest.startswith("~/") else "/" + rest
        return over_ssh(peer, host, directory if rest else "", ["-p", number] if colon else [])
    if "://" in peer:
        raise Usage(f"{peer}: of URLs only ssh://[USER@]HOST[:PORT]/DIR is understood")
    if colon and "/" not in kind:
        return over_ssh(peer, kind, rest, [])
    if not peer:
        raise Usage("no PEER")
    return lambda: here(peer)


def over_ssh(peer, host, directory, more):
    """A way to `zspace serve` on another machine; in the user's default store there, if no directory is named."""
    if not host or host.startswith("-"):
        raise Usage(f"{peer}: no HOST:DIR")
    store = f" --store {shlex.quote(directory)}" if directory else ""
    remote = f"{os.environ.get('ZSPACE_REMOTE') or 'zspace'}{store} serve --stdio"
    return lambda: run([*(os.environ.get("ZSPACE_SSH") or "ssh").split(), *more, "--", host, remote])


def described(error):
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate: {error.verify_message}"
    return str(error) if isinstance(error, Failure) or not getattr(error, "strerror", None) else (
        error.strerror + (f": {error.filename}" if error.filename else ""))
