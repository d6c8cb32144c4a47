"""What is cached, pinned or evictable: the counts match the pieces, and nothing that is gone is found."""

from collections import Counter
from collections.abc import Hashable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from engines.simulated.prefix_cache import Piece, PrefixCache

BLOCK_TOKENS = 4
MANY = 10**6
CONTENTS = "abc"

contexts = st.tuples(st.sampled_from(CONTENTS), st.sampled_from(["blocks", "whole"]), st.integers(1, 40))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), contexts),
        st.tuples(st.just("enter"), contexts),
        st.tuples(st.just("leave"), st.integers(0, 9)),
        st.tuples(st.just("evict"), st.integers(1, 60)),
        st.tuples(st.just("clear"), st.none()),
    ),
    max_size=25,
)


def pieces_of(content: str, kind: str, num_tokens: int) -> Sequence[Piece]:
    """Whole blocks, or one growing piece behind a block that all such contexts begin with."""
    if kind == "blocks":
        return [((content, number), BLOCK_TOKENS) for number in range(num_tokens // BLOCK_TOKENS)]
    return [(("head", 0), BLOCK_TOKENS), ((content, "rest"), num_tokens)]


class ObservedCache:
    """The cache as seen from outside, key by key."""

    def __init__(self, host_capacity_tokens: int) -> None:
        self.cache = PrefixCache(host_capacity_tokens)
        self.keys: set[Hashable] = set()
        self.pinned: list[Sequence[Piece]] = []

    def here(self, key: Hashable) -> int:
        return self.cache.probe([(key, MANY)])[0]

    def anywhere(self, key: Hashable) -> int:
        return self.cache.probe_host([(key, MANY)])[0]

    def front(self, pieces: Sequence[Piece]) -> list[tuple[Hashable, int, int]]:
        """The pieces found in either tier, up to the first incomplete one: how much of each is found, and how much of
        that is in the engine's tier."""
        found = []
        for key, size in pieces:
            had = min(self.anywhere(key), size)
            found.append((key, had, min(self.here(key), size)))
            if had < size:
                break
        return found

    def check(self) -> None:
        pins = {key for pieces in self.pinned for key, _ in pieces}
        assert self.cache.num_tokens == sum(map(self.here, self.keys))
        assert self.cache.num_pinned_tokens == sum(map(self.here, pins))
        for content in CONTENTS:
            blocks = [self.here((content, number)) for number in range(10)]
            assert blocks == sorted(blocks, reverse=True) and sum(0 < held < BLOCK_TOKENS for held in blocks) <= 1, (
                "a piece is cached without those before it"
            )


@settings(max_examples=300)
@given(steps=steps, host_capacity_tokens=st.sampled_from([0, 12, MANY]))
def test_the_cache_finds_exactly_what_it_holds(steps: list[tuple[str, object]], host_capacity_tokens: int) -> None:
    """Pinning costs what `probe` said, and pinned pieces stay. Eviction takes as much as asked, in whole blocks, and
    the host tier keeps as much of it as it has room for."""
    observed = ObservedCache(host_capacity_tokens)
    cache = observed.cache
    for step, argument in steps:
        match step, argument:
            case "enter", (str(content), str(kind), int(num_tokens)):
                pieces = pieces_of(content, kind, num_tokens)
                observed.keys |= {key for key, _ in pieces}
                cached, growth = cache.probe(pieces)
                front = observed.front(pieces)
                found, copied = cache.probe_host(pieces)
                assert found == sum(had for _, had, _ in front)
                assert copied == sum(had - held for _, had, held in front)
                assert cached <= found and (host_capacity_tokens or (cached, 0) == (found, copied))
                before = cache.num_pinned_tokens
                cache.pin(pieces)
                observed.pinned.append(pieces)
                assert cache.num_pinned_tokens == before + growth
                assert cache.probe(pieces)[0] == sum(size for _, size in pieces)
            case "leave", int(number) if observed.pinned:
                cache.unpin(observed.pinned.pop(number % len(observed.pinned)))
            case "evict", int(num_tokens):
                before, idle = cache.num_tokens, cache.num_tokens - cache.num_pinned_tokens
                known = {key: observed.anywhere(key) for key in observed.keys}
                if not idle:
                    continue
                cache.evict(num_tokens, BLOCK_TOKENS)
                evicted = before - cache.num_tokens
                assert min(num_tokens, idle) <= evicted <= min(idle, num_tokens + BLOCK_TOKENS - 1)
                if host_capacity_tokens == MANY:
                    assert known == {key: observed.anywhere(key) for key in observed.keys}
            case "clear", None:
                cache.clear()
                assert cache.num_tokens == cache.num_pinned_tokens
                assert all(observed.anywhere(key) == observed.here(key) for key in observed.keys)
        observed.check()
        at_host = Counter({key: observed.anywhere(key) - observed.here(key) for key in observed.keys})
        assert at_host.total() <= host_capacity_tokens
    for pieces in observed.pinned:
        cache.unpin(pieces)
    assert cache.num_pinned_tokens == 0


def test_the_host_tier_drops_the_oldest_evicted_blocks() -> None:
    """With room for two blocks it keeps the latest two."""
    observed = ObservedCache(8)
    for number, content in enumerate("abcd"):
        pieces = pieces_of(content, "blocks", 4)
        observed.cache.pin(pieces)
        observed.cache.unpin(pieces)
        observed.cache.evict(4, BLOCK_TOKENS)
        assert [observed.anywhere((one, 0)) for one in "abcd"][: number + 1] == [
            4 if number - place < 2 else 0 for place in range(number + 1)
        ]
