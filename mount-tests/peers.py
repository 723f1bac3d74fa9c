"""Stores that are served, and ways between them that are slow or break."""
import os
import re
import socket
import subprocess
import threading
import time

from zspace import BINARY, Zspace, eventually


class Server:
    """`zspace serve` in a process of its own."""

    def __init__(self, zspace, *args, env=None):
        self.process = subprocess.Popen(zspace.command("serve", "--make", *args), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True, env=env and os.environ | env)  # fmt: skip
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"serve ended: {self.process.stderr.read()}")
        self.address = re.search(r" on (\S+)$", line)[1]

    def stop(self):
        """Ends it as a user does; what it had to say."""
        self.process.terminate()
        _, messages = self.process.communicate(timeout=30)
        assert self.process.returncode == 0, messages
        return messages

    def kill(self):
        self.process.kill()
        self.process.communicate()


class Proxy:
    """Passes bytes on between a new port and an address; `cut` ends every connection after so many bytes from the server, which sends
    no more than `rate` bytes a second."""

    def __init__(self, address, cut=None, rate=None):
        self.target, self.cut, self.rate = address, cut, rate
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            host, port = self.target.removeprefix("tcp:").rsplit(":", 1)
            server = socket.create_connection((host, int(port)))
            self.connect(client, server)

    def connect(self, client, server):
        for a, b, limit in ((client, server, None), (server, client, self.cut)):
            threading.Thread(target=self.pump, args=(a, b, limit), daemon=True).start()

    def pump(self, source, sink, limit):
        passed = 0
        try:
            while data := source.recv(65536):
                if self.rate:
                    time.sleep(len(data) / self.rate)
                if limit is not None:
                    data = data[: max(0, limit - passed)]
                    passed += len(data)
                sink.sendall(data)
                if limit is not None and passed >= limit:
                    break
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self):
        self.listener.close()


def heads(zspace):
    """Each branch of a store and the ids of its versions."""
    found = {}
    for name in (line.split()[0] for line in zspace.out("branch").splitlines()):
        found[name] = [v["id"] for v in zspace.json_lines("log", name)]
    return found


def openssh(tmp_path):
    """How to call ssh so that it logs in on this machine, with a server of our own and nobody else's keys."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    (tmp_path / "authorized").write_text((tmp_path / "user.pub").read_text())
    (tmp_path / "sshd_config").write_text(
        f"HostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/authorized\nStrictModes no\nUsePAM no\n"
        f"PermitRootLogin yes\nPidFile none\nLogLevel ERROR\n"
    )
    os.makedirs("/run/sshd", exist_ok=True)
    proxy = tmp_path / "proxy"
    proxy.write_text(f"#!/bin/sh\nexec /usr/sbin/sshd -i -f {tmp_path}/sshd_config\n")
    proxy.chmod(0o755)
    return (f"ssh -F none -o ProxyCommand={proxy} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "
            f"-o IdentityFile={tmp_path}/user -o BatchMode=yes -o LogLevel=ERROR")  # fmt: skip


def store(path):
    return Zspace(path)


def certificate(directory, name):
    """A self-signed certificate for this machine; its text."""
    directory.mkdir()
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", directory / "key.pem", "-out", directory / "cert.pem", "-subj", f"/CN={name}",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"],
        check=True, capture_output=True,
    )  # fmt: skip
    return (directory / "cert.pem").read_text()


__all__ = ["BINARY", "Proxy", "Server", "certificate", "eventually", "heads", "openssh", "store"]
