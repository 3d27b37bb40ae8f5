"""Tell people: by e-mail, a webhook or a command, each tried for itself."""

from __future__ import annotations

import os
import smtplib
import subprocess
from collections.abc import Callable, Sequence
from email.message import EmailMessage
from functools import partial

from bloomery.base.errors import first_line
from bloomery.config.recipe import AlertsSection

_TIMEOUT_SECONDS = 30.0


def notify(texts: Sequence[str], subject: str, section: AlertsSection) -> tuple[bool, list[str]]:
    """(whether nobody of those who should be was reached, what could not be sent and why)."""
    ways: dict[str, Callable[[], None]] = {}
    body = "\n".join(texts)
    if section.email:
        ways["e-mail"] = partial(_mail, body, subject, section)
    if section.webhook_variable:
        ways["webhook"] = partial(_post, body, section.webhook_variable)
    if section.command:
        ways["command"] = partial(_run, body, section.command)
    failed = []
    for name, send in ways.items() if texts else ():
        try:
            send()
        except Exception as error:  # whatever is wrong with one way, the others are tried
            failed.append(f"{name}: {first_line(error)}")
    return 0 < len(ways) == len(failed), failed


def _mail(body: str, subject: str, section: AlertsSection) -> None:
    message = EmailMessage()
    message["Subject"], message["From"], message["To"] = subject, section.sender, ", ".join(section.email)
    message.set_content(body)
    host, _, port = section.smtp.partition(":")
    with smtplib.SMTP(host, int(port or 25), timeout=_TIMEOUT_SECONDS) as server:
        server.send_message(message)


def _post(body: str, variable: str) -> None:
    """`{"text": ...}`, which Slack and others take. The address is a secret: it stays in the environment."""
    import requests

    if not (address := os.environ.get(variable)):
        raise OSError(f"the environment variable {variable} is not set")
    try:
        requests.post(address, json={"text": body}, timeout=_TIMEOUT_SECONDS).raise_for_status()
    except requests.RequestException as error:  # its text has the address
        said = f"it answers {error.response.status_code}" if error.response is not None else type(error).__name__
        raise OSError(f"{said} (the address is that of {variable})") from None


def _run(body: str, command: str) -> None:
    subprocess.run(["bash", "-c", command], input=body, text=True, check=True, timeout=_TIMEOUT_SECONDS, stdout=2)
