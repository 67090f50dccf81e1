"""One pass of the model in a worker: a step of the sidecar when each request has one new token and is
stored, and otherwise vLLM's attention, whose new rows are stored."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import pqcached
import torch
from pqcached import Selection, Step, StepItem

from . import log
from .plan import Part, Plan, Row, rows_of
from .requests import Requests
from .sidecar import Sidecar

# Rows of longer prompts are stored layer by layer, rather than copied until the pass ends.
COPIED_TOKENS = 1024


class Pass:
    """Takes the layers in their order."""

    def __init__(self, plan: Plan, requests: Requests, sidecar: Sidecar, selection: Optional[Selection], layer_count: int) -> None:
        self._plan, self._requests, self._sidecar = plan, requests, sidecar
        self._selection, self._layer_count = selection, layer_count
        self._rows: Optional[List[Row]] = None
        self._step: Optional[Step] = None
        self._layers = 0  # that are done
        self._copies: Dict[str, Dict[int, Tuple[torch.Tensor, torch.Tensor]]] = {}

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, metadata: Any,
               stock: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Computes the attention of a layer. stock: vLLM's, which writes to `output` and returns it."""
        if self._rows is None:
            self._begin(metadata)
        self._layers += 1
        if self._step is not None:
            end = self._step.query_tokens  # vLLM may pad the batch
            try:
                self._step.decode(layer, query[:end], key[:end], value[:end], out=(output[:end], None))
                self._step.check()
                return output
            except pqcached.Error as error:
                self._fail(error)
        result = stock()
        self._take(layer, key, value)
        return result

    def _begin(self, metadata: Any) -> None:
        columns = (metadata.seq_lens.long() - 1) // self._plan.block_tokens
        last_blocks = metadata.block_table.gather(1, columns.unsqueeze(1)).squeeze(1)
        rows = rows_of(self._plan, last_blocks.tolist(), metadata.seq_lens.tolist(), metadata.query_start_loc.tolist())
        if rows is None:
            log.warn("vLLM's batch does not match its plan; this pass is not stored")
            for part in self._plan.parts:
                self._requests.drop(part.request_id)
            rows = []
        is_decode = bool(rows) and self._selection is not None
        for row in rows:
            is_decode = self._requests.continues(row.part) and is_decode and self._is_decoded(row.part)
        self._rows = [row for row in rows if self._requests.is_followed(row.part.request_id)]
        if is_decode:
            self._begin_step()

    def _is_decoded(self, part: Part) -> bool:
        """Whether a part is one token behind those in the sidecar."""
        stored = self._requests.find(part.request_id)
        return stored is not None and part.count == 1 and stored.passed == part.first > 0

    def _begin_step(self) -> None:
        assert self._rows is not None and self._sidecar.client is not None
        items = []
        for row in self._rows:
            stored = self._requests.find(row.part.request_id)
            assert stored is not None
            stored.has_stepped = True
            items.append(StepItem(stored.sequence, row.part.first))
        try:
            self._step = self._sidecar.client.begin_step(items, self._selection, exact_until_indexed=True)
        except pqcached.Error as error:
            self._fail(error)

    def _fail(self, error: pqcached.Error) -> None:
        """Goes on without the step: results of earlier layers have been checked."""
        self._requests.failed(error, "a decode step")
        if self._step is not None:
            self._step.close()
            self._step = None
        for row in self._rows or []:
            self._requests.drop(row.part.request_id)
        self._rows = []

    def _take(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores a layer's new rows, or copies them: vLLM uses their memory again."""
        assert self._rows is not None
        for part, begin, end in self._rows:
            if not self._requests.is_followed(part.request_id):
                continue
            stored = self._requests.find(part.request_id)
            if part.count > COPIED_TOKENS and stored is not None and not stored.has_stepped:
                self._requests.ingest(part, layer, key[begin:end], value[begin:end])
            else:
                self._copies.setdefault(part.request_id, {})[layer] = key[begin:end].clone(), value[begin:end].clone()

    def end(self) -> None:
        """Ends the pass after its last layer, or after an error of vLLM's in between."""
        if self._rows is None:  # the pass had no attention
            return
        if self._layers != self._layer_count:
            if self._step is not None:
                self._step.close()
            for row in self._rows:
                self._requests.drop(row.part.request_id)
            return
        if self._step is not None:
            self._end_step()
            return
        for row in self._rows:
            rows = self._copies.get(row.part.request_id)
            if rows is None:
                self._requests.pass_on(row.part)
            else:
                self._requests.enqueue(row.part, rows)
        late = [row.part for row in self._rows if self._requests.is_late(row.part.request_id)]
        self._requests.begin_late()
        for part in late:
            if self._requests.continues(part):
                self._requests.enqueue(part, self._copies[part.request_id])

    def _end_step(self) -> None:
        assert self._step is not None and self._rows is not None
        states = [self._requests.find(row.part.request_id) for row in self._rows]
        try:
            self._step.end(names=[state.names if state else None for state in states])
            self._requests.counts.steps += 1
        except pqcached.Error as error:
            self._fail(error)
            return
        for row, state in zip(self._rows, states):
            self._requests.pass_on(row.part)
            if state is not None:
                state.names = None
