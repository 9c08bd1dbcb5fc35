"""How a bucket is reached: its address, and the credentials for it, which are shown to nobody."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import urlsplit

from lakebook.config import Settings
from lakebook.errors import InvalidSetting

_REGION = "us-east-1"
_SECRETS = ("access_key_id", "secret_access_key", "session_token")


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
        if self.endpoint and (urlsplit(self.endpoint).scheme not in ("http", "https") or "@" in self.endpoint):
            raise InvalidSetting(
                "it is not the address of a store", on="s3_endpoint", remedy="Write https://host or http://host:port"
            )

    def __repr__(self) -> str:
        told = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name not in _SECRETS)
        return f"S3Access({', '.join(told)})"

    @property
    def has_credentials(self) -> bool:
        """Whether credentials were given, and need not be looked for."""
        return bool(self.access_key_id)

    def resolved(self) -> S3Access:
        """The same with what the environment says about the address; AWS's own names for it are known."""
        env = os.environ
        endpoint = self.endpoint or env.get("AWS_ENDPOINT_URL_S3", "") or env.get("AWS_ENDPOINT_URL", "")
        region = self.region or env.get("AWS_REGION", "") or env.get("AWS_DEFAULT_REGION", "")
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


def access_of(settings: Settings) -> S3Access:
    """What a book's settings say about its bucket."""
    named: dict[str, Any] = {name: getattr(settings, f"s3_{name}") for name in (f.name for f in fields(S3Access))}
    return S3Access(**named)
