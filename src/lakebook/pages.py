"""One page of a long list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

from lakebook.errors import InvalidPage
from lakebook.names import shown

T = TypeVar("T")

PAGE_SIZE = 1000
MAX_PAGE_SIZE = 100_000


@dataclass(frozen=True)
class Page(Sequence[T], Generic[T]):
    """Some items of a list, and where the rest begins: give `next` as `after` to get it."""

    items: tuple[T, ...]
    next: Any = None

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)


def check_limit(limit: object) -> int:
    """Return `limit` if a page can have that many items."""
    if isinstance(limit, int) and not isinstance(limit, bool) and 1 <= limit <= MAX_PAGE_SIZE:
        return limit
    raise InvalidPage(f"{shown(limit)} is not a page size", on="page", remedy=f"Use 1 to {MAX_PAGE_SIZE}")


def page_of(items: Sequence[T], limit: int, token: Callable[[T], Any]) -> Page[T]:
    """A page from `limit + 1` items: the one too many tells that there are more."""
    if len(items) > limit:
        kept = tuple(items[:limit])
        return Page(kept, token(kept[-1]))
    return Page(tuple(items))


def every(fetch: Callable[[Any], Page[T]]) -> Iterator[T]:
    """All items of all pages, fetched as they are needed."""
    after = None
    while True:
        page = fetch(after)
        yield from page
        if page.next is None:
            return
        after = page.next
