"""The authentication exchange, without the socket.

`Authentication.answer` takes the body of each Authentication message and returns what to send. SCRAM-SHA-256 is
scramp's, with channel binding where TLS is on and the server offers it; MD5 is here because old roles still have it, and
cleartext because LDAP, PAM and tokens of cloud providers work that way. Both are sent only where the server's certificate is
verified, or where a setting allows it.
"""

from __future__ import annotations

import hashlib
import ssl

from scramp import ScramClient, ScramException

from headwater.errors import AuthenticationError, ProtocolError
from headwater.wire import channel_binding, messages
from headwater.wire.channel_binding import binding_of
from headwater.wire.messages import Body
from headwater.wire.saslprep import PreparedPassword
from headwater.wire.settings import ConnectSettings
from headwater.wire.tls_config import TlsMode

_OK = 0
_CLEARTEXT = 3
_MD5 = 5
_SASL = 10
_SASL_CONTINUE = 11
_SASL_FINAL = 12

_SCRAM = "SCRAM-SHA-256"
_SCRAM_PLUS = "SCRAM-SHA-256-PLUS"


class Authentication:
    """One authentication. `finished` once the server has accepted the role and, under SCRAM, has proved that it knows the
    password's verifier."""

    def __init__(self, settings: ConnectSettings, tls_object: ssl.SSLObject | None) -> None:
        self._settings = settings
        self._tls_object = tls_object
        self._scram: ScramClient | None = None
        self._server_proved = False
        self.finished = False

    def answer(self, body: bytes) -> bytes | None:
        reader = Body(body, "authentication")
        code = reader.int32()
        if code == _OK:
            if self._scram is not None and not self._server_proved:
                raise self._refused(
                    "the server skipped its part of SCRAM, in which it proves that it knows the role",
                    "Check that host is the server you mean.",
                )
            self.finished = True
            return None
        if code == _CLEARTEXT:
            if not self._settings.may_send_cleartext_password:
                raise cleartext_refused(self._settings)
            return messages.password(self._password())
        if code == _MD5:
            if not self._settings.may_send_md5_password:
                raise md5_refused(self._settings)
            return messages.password(self._md5(reader.take(4)))
        if code == _SASL:
            return self._begin_scram(reader)
        if code in (_SASL_CONTINUE, _SASL_FINAL):
            return self._continue_scram(code, reader.rest())
        raise self._refused(
            f"the server asks for authentication method {code}, which is not supported",
            "Use scram-sha-256 in pg_hba.conf for this role, database and address.",
        )

    def _md5(self, salt: bytes) -> str:
        inner = hashlib.md5((self._password() + self._settings.username).encode(), usedforsecurity=False).hexdigest()
        return "md5" + hashlib.md5(inner.encode() + salt, usedforsecurity=False).hexdigest()

    def _begin_scram(self, reader: Body) -> bytes:
        offered = []
        while not reader.is_empty and (name := reader.text()):
            offered.append(name)
        known = [name for name in offered if name in (_SCRAM, _SCRAM_PLUS)]
        if not known:
            raise self._refused(
                f"the server offers only {', '.join(offered) or 'nothing'}",
                "Use scram-sha-256 in pg_hba.conf for this role, database and address.",
            )
        password = self._password()
        self._scram = self._scram_client(known)
        # Set afterwards: scramp prepares passwords as the RFC says, and refuses some that Postgres takes.
        self._scram.password = PreparedPassword(password)
        return messages.sasl_initial(self._scram.mechanism_name, self._scram.get_client_first().encode())

    def _scram_client(self, offered: list[str]) -> ScramClient:
        """The strongest method that was offered. Never a weaker one because the stronger could not be done: a man in the middle
        chooses the certificate, and would choose one that cannot be bound."""
        try:
            # The user name inside SCRAM is ignored by Postgres, which has it from the startup packet.
            if self._tls_object is None:
                return ScramClient(offered, "*", "*")
            binding = binding_of(self._tls_object)
            if _SCRAM_PLUS not in offered:
                # Says that we would have bound it: a server that did offer it then knows that the offer was taken out on
                # the way. The binding itself is not sent, so it does not matter if there is none.
                return ScramClient([_SCRAM], "*", "*", (channel_binding.TYPE, binding or b"none"))
            if binding is not None:
                return ScramClient([_SCRAM_PLUS], "*", "*", (channel_binding.TYPE, binding))
            if self._settings.tls.verifies and _SCRAM in offered:
                return ScramClient([_SCRAM], "*", "*")
        except ScramException as error:
            raise self._scram_failed(error) from error
        raise binding_impossible(self._settings)

    def _continue_scram(self, code: int, data: bytes) -> bytes | None:
        if self._scram is None:
            raise ProtocolError("SCRAM message before SCRAM began")
        try:
            text = data.decode("utf-8")
            if code == _SASL_CONTINUE:
                self._scram.set_server_first(text)
                return messages.sasl_response(self._scram.get_client_final().encode())
            self._scram.set_server_final(text)
            self._server_proved = True
            return None
        except UnicodeDecodeError as error:
            raise ProtocolError("SCRAM message is not UTF-8") from error
        except ScramException as error:
            raise self._scram_failed(error) from error

    def _password(self) -> str:
        if self._settings.password is None:
            raise self._refused(
                "the server asks for a password and none is set", "Set password in the connection's settings."
            )
        return self._settings.password.reveal()

    def _scram_failed(self, error: ScramException) -> AuthenticationError:
        return self._refused(
            f"SCRAM: {error}",
            "Check that host is the server you mean, and set the role's password again with the server's "
            "scram_iterations at 4096 or more.",
        )

    def _refused(self, detail: str, hint: str) -> AuthenticationError:
        who = f'role "{self._settings.username}" could not be authenticated at {self._settings.address}'
        return AuthenticationError(who, detail=detail, hint=hint)


def binding_impossible(settings: ConnectSettings) -> AuthenticationError:
    return AuthenticationError(
        f"SCRAM channel binding is not possible with the server at {settings.address}",
        detail="the signature of the server's certificate has no hash that both sides know (as with Ed25519 and Ed448), and "
        f'tls.mode = "{settings.tls.sslmode}" does not verify the certificate; nothing was sent',
        hint='Set tls.mode = "verify-full" with tls.trusted_root_certs, which needs no channel binding, or give the server '
        "a certificate with an RSA or ECDSA signature.",
    )


def cleartext_refused(settings: ConnectSettings) -> AuthenticationError:
    return AuthenticationError(
        f"server at {settings.address} asks for the password in clear text",
        detail=_not_verified(settings),
        hint='Set tls.mode = "verify-full", use scram-sha-256 in pg_hba.conf, or, where the network itself is trusted, set '
        "allow_cleartext_password = true.",
    )


def md5_refused(settings: ConnectSettings) -> AuthenticationError:
    return AuthenticationError(
        f"server at {settings.address} asks for the password's MD5 hash",
        detail=_not_verified(settings),
        hint="Set the role's password again under password_encryption = 'scram-sha-256', or set tls.mode = "
        '"verify-full", or, where the network itself is trusted, allow_md5_password = true.',
    )


def _not_verified(settings: ConnectSettings) -> str:
    return (
        f'tls.mode is "{settings.tls.sslmode}" without trusted_root_certs, so the server\'s certificate is not verified and any '
        "server could be asking; nothing was sent"
        if settings.tls.sslmode is not TlsMode.DISABLE
        else 'tls.mode is "disable", so any server could be asking, and others could read it; nothing was sent'
    )
