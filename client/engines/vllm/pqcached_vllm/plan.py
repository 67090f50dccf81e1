"""The scheduler's message to the workers about one pass. Needs neither vLLM nor a sidecar.

A request has a sequence in the sidecar from its beginning until it ends or is preempted. A pass
computes the next tokens of some requests; each of them writes its last row to a block of its own,
by which the workers recognize the request in the batch.
"""

from __future__ import annotations

import dataclasses
from typing import AbstractSet, Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

SHARED_TOKENS = 128  # later prompts share rows in groups of so many tokens


@dataclasses.dataclass(frozen=True)
class Beginning:
    """A request that begins, or comes back after it was preempted."""

    request_id: str
    token_ids: Optional[Tuple[int, ...]]  # that are known; None: its rows must not be stored
    extra_key: bytes
    local_tokens: int  # whose rows vLLM has already
    loaded_tokens: int  # behind them, to be loaded from the sidecar
    blocks: Tuple[int, ...]  # its block table

    @property
    def first(self) -> int:
        """The first position that vLLM computes."""
        return self.local_tokens + self.loaded_tokens


@dataclasses.dataclass(frozen=True)
class Part:
    """The tokens of one request in a pass."""

    request_id: str
    first: int
    count: int
    last_block: int  # with its last row

    @property
    def end(self) -> int:
        return self.first + self.count


@dataclasses.dataclass(frozen=True)
class NewNames:
    """Token ids of a request that continue the known ones."""

    request_id: str
    begin: int
    token_ids: Tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What happens to requests, in this order: names, ended, beginnings, parts."""

    block_tokens: int
    names: Tuple[NewNames, ...] = ()
    ended: Tuple[str, ...] = ()  # finished or preempted
    beginnings: Tuple[Beginning, ...] = ()
    parts: Tuple[Part, ...] = ()


class Scheduled(NamedTuple):
    """A request in a pass, as the scheduler describes it."""

    request_id: str
    blocks: Sequence[int]
    computed: int  # tokens whose rows there are before the pass


@dataclasses.dataclass
class Known:
    """The planner's memory of a request."""

    token_ids: Any  # a sequence that grows
    extra_key: bytes
    is_stored: bool
    loaded: int = 0  # tokens to load when it begins
    named: int = 0
    blocks: List[int] = dataclasses.field(default_factory=list)

    def begin(self, one: Scheduled) -> Beginning:
        self.named = len(self.token_ids)
        return Beginning(one.request_id, tuple(self.token_ids) if self.is_stored else None, self.extra_key,
                         one.computed - self.loaded, self.loaded, tuple(self.blocks))

    def part(self, one: Scheduled, counts: Mapping[str, int], block_tokens: int) -> Part:
        count = counts[one.request_id]
        return Part(one.request_id, one.computed, count, self.blocks[(one.computed + count - 1) // block_tokens])

    def new_names(self, request_id: str) -> List[NewNames]:
        """Returns names of further tokens when they complete a group that can be shared."""
        count = len(self.token_ids)
        if not self.is_stored or not self.named or count // SHARED_TOKENS <= self.named // SHARED_TOKENS:
            return []
        begin, self.named = self.named, count
        return [NewNames(request_id, begin, tuple(self.token_ids[begin:count]))]


def tokens_to_load(stored: int, prompt: int, local: int, block_tokens: int) -> int:
    """Returns how many tokens behind `local` ones are loaded in whole blocks. The last token of a
    prompt is computed in any case.
    """
    usable = min(stored, prompt - 1) // block_tokens * block_tokens
    return max(0, usable - local)


def slots(blocks: Sequence[int], begin: int, end: int, block_tokens: int) -> List[int]:
    """Returns the places of the tokens [begin, end) in vLLM's cache."""
    return [blocks[token // block_tokens] * block_tokens + token % block_tokens for token in range(begin, end)]


def blocks_of(blocks: Sequence[int], begin: int, end: int, block_tokens: int) -> List[int]:
    """Returns the blocks that have a row of the tokens [begin, end)."""
    return list(blocks[begin // block_tokens:-(-end // block_tokens)])


class Row(NamedTuple):
    """A part, and its tokens in the batch."""

    part: Part
    begin: int
    end: int


def rows_of(plan: Plan, last_blocks: Sequence[int], lengths: Sequence[int], starts: Sequence[int]) -> Optional[List[Row]]:
    """Returns the rows of the batch in its order; None when they do not match the plan.

    last_blocks, lengths: of each request, its block that is being written and its tokens. starts:
    the place of each one's first new token in the batch, and the number of all new tokens.
    """
    by_block = {part.last_block: part for part in plan.parts}
    rows = []
    for block, length, begin, end in zip(last_blocks, lengths, starts, starts[1:]):
        part = by_block.pop(block, None)
        if part is None or part.end != length or part.count != end - begin:
            return None
        rows.append(Row(part, begin, end))
    return rows if not by_block else None


class Planner:
    """Follows the scheduler's requests, and makes the plan of each pass."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._known: Dict[str, Known] = {}
        # Requests that have finished since the last plan: names, and block tables.
        self._names: List[NewNames] = []
        self._finished: List[List[int]] = []
        self._forgotten: List[str] = []  # requests whose rows end with the next plan

    def allocated(self, request_id: str, token_ids: Any, extra_key: Optional[bytes], loaded: int) -> None:
        """Takes a request that begins or comes back with the next plan. token_ids: its growing
        sequence. extra_key: None when its rows must not be stored.
        """
        self._known[request_id] = Known(token_ids, extra_key or b"", extra_key is not None, loaded)

    def finished(self, request_id: str) -> None:
        known = self._known.pop(request_id, None)
        if known is not None:
            self._names += known.new_names(request_id)
            self._finished.append(known.blocks)

    def forget(self) -> None:
        """Ends the rows of all requests with the next plan; vLLM goes on with the requests."""
        for request_id, known in self._known.items():
            if known.is_stored:
                known.is_stored = False
                self._forgotten.append(request_id)

    def blocks_from(self, unloaded: AbstractSet[int]) -> Set[int]:
        """Returns blocks that were not loaded, and those that the requests of the last plan have
        behind them: their rows come from wrong ones.
        """
        found = set(unloaded)
        for blocks in (*(known.blocks for known in self._known.values()), *self._finished):
            first = next((place for place, block in enumerate(blocks) if block in unloaded), len(blocks))
            found.update(blocks[first:])
        return found

    def plan(self, begun: Iterable[Scheduled], running: Iterable[Scheduled], replaced: Mapping[str, Sequence[int]],
             counts: Mapping[str, int], ended: Iterable[str]) -> Plan:
        """Returns the plan of a pass.

        begun: requests that begin or come back, with their block tables; running: others, with
        their further blocks. replaced: block tables that have changed as a whole. counts: tokens
        that the pass computes. ended: requests that were finished or preempted since the last pass.
        """
        names, self._names = self._names, []
        self._finished.clear()
        ended = tuple(ended)
        for request_id in ended:
            if request_id in self._known:
                self._known[request_id].blocks = []
        ended, self._forgotten = tuple({*ended, *self._forgotten}), []
        beginnings, parts = [], []
        for one in begun:
            known = self._known.get(one.request_id)
            if known is not None:
                known.blocks = list(one.blocks)
                beginnings.append(known.begin(one))
                parts.append(known.part(one, counts, self._block_tokens))
        for one in running:
            known = self._known.get(one.request_id)
            if known is not None:
                known.blocks.extend(one.blocks)
                known.blocks = list(replaced.get(one.request_id, known.blocks))
                parts.append(known.part(one, counts, self._block_tokens))
                names += known.new_names(one.request_id)
        return Plan(self._block_tokens, tuple(names), ended, tuple(beginnings), tuple(parts))
