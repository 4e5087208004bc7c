"""Sockets and who may use them: connections for whole messages, server, client, certificates, tokens."""

from planetary.net.authority import Authority
from planetary.net.client import Trust, connect
from planetary.net.connection import Connection, Tuning
from planetary.net.handshake import (
    TokenCheck,
    answer_hello,
    judge_hello,
    receive_hello,
    say_hello,
)
from planetary.net.loop_thread import ThreadedConnection
from planetary.net.server import Server, ServerLimits, serve
from planetary.net.session import refusal_error

__all__ = [
    "Authority",
    "Connection",
    "Server",
    "ServerLimits",
    "ThreadedConnection",
    "TokenCheck",
    "Trust",
    "Tuning",
    "answer_hello",
    "connect",
    "judge_hello",
    "receive_hello",
    "refusal_error",
    "say_hello",
    "serve",
]
