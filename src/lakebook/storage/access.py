"""How a bucket is reached: its address, and the credentials for it, which are shown to nobody."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields, replace
from typing import Any

from lakebook.config import Settings, split_url
from lakebook.errors import InvalidSetting

_REGION = "us-east-1"
_SECRETS = ("access_key_id", "secret_access_key", "session_token")
_ENDPOINT, _ADDRESS = "s3_endpoint", "Write https://host or http://host:port"
_PLAIN_ADDRESS = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:%/-]+")


@dataclass(frozen=True, kw_only=True)
class S3Access:
    """Where the store is that has the bucket, and with what it is asked.

    Without credentials the usual ones of AWS are looked for, by each process that needs them: the environment, the
    profiles in the home folder, the container's, the machine's. It can be sent to executors.
    """

    endpoint: str = ""
    region: str = ""
    path_style: str = "auto"
    access_key_id: str = ""
    secret_access_key: str = ""
    session_token: str = ""
    #: Seconds that one request may take, and for which a failing one is tried again.
    request_seconds: float = 60.0
    retry_seconds: float = 120.0

    def __post_init__(self) -> None:
        if bool(self.access_key_id) != bool(self.secret_access_key):
            raise InvalidSetting(
                "of a key's two parts one is missing",
                on="warehouse",
                remedy="Set both s3_access_key_id and s3_secret_access_key, or none of them",
            )
        if self.session_token and not self.access_key_id:
            raise InvalidSetting(
                "there is a token, and no key that it belongs to",
                on="warehouse",
                remedy="Set s3_access_key_id and s3_secret_access_key with s3_session_token, or none of them",
            )
        if self.endpoint and not _is_address(self.endpoint):
            raise InvalidSetting("it is not the address of a store", on=_ENDPOINT, remedy=_ADDRESS)
        for name in (*_SECRETS, "region"):
            check_header(getattr(self, name), f"s3_{name}")

    def __repr__(self) -> str:
        told = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name not in _SECRETS)
        return f"S3Access({', '.join(told)})"

    @property
    def has_credentials(self) -> bool:
        """Whether credentials were given, and need not be looked for."""
        return bool(self.access_key_id)

    def resolved(self) -> S3Access:
        """The same with what the environment, and the profile that it names, say about the address."""
        env = os.environ
        endpoint = self.endpoint or env.get("AWS_ENDPOINT_URL_S3", "") or env.get("AWS_ENDPOINT_URL", "")
        region = self.region or env.get("AWS_REGION", "") or env.get("AWS_DEFAULT_REGION", "")
        if not endpoint or not region:
            theirs = _told_by_profile()
            endpoint, region = endpoint or theirs[0], region or theirs[1]
        by_path = ("yes" if endpoint else "no") if self.path_style == "auto" else self.path_style
        return replace(self, endpoint=endpoint.rstrip("/"), region=region, path_style=by_path)

    def iceberg_properties(self, *, credentials: bool) -> dict[str, str]:
        """The same in the words of Iceberg's engines; credentials are only for those of this process."""
        found = self.resolved()
        told = {"s3.endpoint": found.endpoint, "s3.region": found.region, "client.region": found.region}
        told["s3.path-style-access"] = "true" if found.path_style == "yes" else ""
        if credentials:
            told |= {
                "s3.access-key-id": found.access_key_id,
                "s3.secret-access-key": found.secret_access_key,
                "s3.session-token": found.session_token,
            }
        return {name: value for name, value in told.items() if value}

    def with_region(self, found: str | None) -> S3Access:
        """The same with a region: the one it has, else the one that was found, else the usual one."""
        return replace(self, region=self.region or found or _REGION)


def _is_address(endpoint: str) -> bool:
    """Whether requests can be sent there. What sends them would panic, and not say so, over what cannot be."""
    parts = split_url(endpoint, _ENDPOINT, _ADDRESS)
    try:
        _ = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and _PLAIN_ADDRESS.fullmatch(endpoint) is not None


def check_header(value: str, on: str) -> None:
    """Refuse what cannot stand in the head of a request, over which its sender would panic too."""
    if not (value.isascii() and value.isprintable()):
        raise InvalidSetting(
            "it has a character that cannot be in it, perhaps a line break at its end", on=on, remedy="Write it anew"
        )


def _told_by_profile() -> tuple[str, str]:
    """The endpoint and the region that the files of AWS's own tools name; none without them, or without the profile."""
    try:
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session
    except ModuleNotFoundError:
        return "", ""
    session = Session()
    try:
        profile = session.get_scoped_config()
        own = session.full_config.get("services", {}).get(profile.get("services"), {}).get("s3")
        # As the tools look for it: what is said of this service counts before what is said of all.
        endpoint = (own.get("endpoint_url") if isinstance(own, dict) else "") or profile.get("endpoint_url") or ""
        if session.get_config_variable("ignore_configured_endpoint_urls"):
            endpoint = ""
        return str(endpoint), str(session.get_config_variable("region") or "")
    except BotoCoreError:
        # Who opens the bucket is told.
        return "", ""


def access_of(settings: Settings) -> S3Access:
    """What a book's settings say about its bucket."""
    named: dict[str, Any] = {name: getattr(settings, f"s3_{name}") for name in (f.name for f in fields(S3Access))}
    return S3Access(**named)
