"""Takes the rows of wanted requests out of each forward pass and sends them on their way to a file.

N rows of a batch, T tokens of a request, L auxiliary layers, H hidden size.
"""

import json
import logging
import re
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from .layers import BoundaryTap, UnsupportedModel
from .rows import RID_PREFIX, GapError, Piece, RequestRows, place
from .staging import Staging, StagingFull
from .transfer import DirectTransfer, StreamTransfer
from .writer import Writer

logger = logging.getLogger(__name__)
_SAFE_RID = re.compile(r"[A-Za-z0-9._-]{1,200}")


@dataclass
class Forward:
    """What the logits processor is handed in one prefill pass."""

    rids: list[str]
    prefix_lens: list[int]
    extend_lens: list[int]
    input_ids: torch.Tensor  # [≥ N], may be padded and is reused by the next pass
    final: torch.Tensor  # [≥ N, H], after the final norm
    aux: list[torch.Tensor]  # L tensors [≥ N, H]; empty when the tap takes them

    @classmethod
    def of(cls, batch: Any, final: torch.Tensor, aux: list[torch.Tensor] | None) -> "Forward | None":
        """From SGLang's `ForwardBatch`; None for a batch without request ids (a graph's dummy, a warm-up).

        Token ids are the batch's: multimodal classes (Kimi-K2.5, Qwen3-VL) run their language model on embeddings, and
        hand its logits processor None for them (managers/mm_utils.py, `general_mm_embed_routine`).
        """
        if batch.rids is None or batch.padded_static_len >= 0:
            return None
        prefix_lens, extend_lens = list(batch.extend_prefix_lens_cpu), list(batch.extend_seq_lens_cpu)
        return cls(batch.rids, prefix_lens, extend_lens, batch.input_ids, final, aux or [])


class Recorder:
    """One per writing rank.

    Parameters
    ----------
    num_aux : L. metadata : goes into every dump. dtype : of dumps; a model served in another one is rounded on its way.
    tap : stands in for capture that the model does not have. all_tap : takes every boundary, for `hs-all-` requests.
    transfer : how rows get into host memory.
    """

    def __init__(
        self,
        staging: Staging,
        writer: Writer,
        num_aux: int,
        metadata: dict[str, str],
        dtype: torch.dtype,
        tap: BoundaryTap | None = None,
        all_tap: BoundaryTap | None = None,
        transfer: DirectTransfer | StreamTransfer | None = None,
    ):
        self.staging, self.writer, self.num_aux, self.metadata = staging, writer, num_aux, metadata
        self.dtype = dtype
        self.tap, self.all_tap = tap, all_tap
        self.transfer = transfer or DirectTransfer()
        self._rows: weakref.WeakValueDictionary[str, RequestRows] = weakref.WeakValueDictionary()

    def begin(self, requests: list) -> None:
        """Before a forward: give each wanted request its rows, which live as long as the request object does."""
        for rows in list(self._rows.values()):
            rows.drop_if_aborted()
        wanted = []
        for request in requests:
            if not request.rid.startswith(RID_PREFIX) or getattr(request, "to_finish", None) is not None:
                continue  # an ordinary request, or one already refused, whose prompt SGLang has replaced by a stub
            rows = getattr(request, "hs_rows", None)
            if rows is None:
                rows = request.hs_rows = RequestRows(request)
                self._rows[request.rid] = rows
                if not _SAFE_RID.fullmatch(request.rid):
                    rows.error = "a rid may hold letters, digits, dot, dash and underscore, at most 200"
                elif rows.wants_all and self.all_tap is None:
                    rows.error = "this model's boundaries cannot be tapped: only its own capture works"
                else:
                    rows.error = self.writer.check()
            if not rows.submitted:
                wanted.append(rows)
        if self.tap and wanted:
            self.tap.attach()
        if self.all_tap and any(rows.wants_all for rows in wanted):
            self.all_tap.attach()

    def record(self, forward: Forward) -> None:
        """Copy the wanted rows of a prefill pass; queue the requests that are complete with it."""
        self.transfer.drop_finished()
        pieces = self._pieces(forward)
        tensors = self._tensors(forward, pieces) if pieces else None
        for tap in filter(None, (self.tap, self.all_tap)):
            tap.detach()  # also when what it took was not wanted after all
        if tensors is None:
            return
        held = self.transfer.hold(tensors, self.dtype)
        for rows, piece in pieces:  # one after the other: what is complete leaves room for what follows
            if not self._open(rows, held):
                continue
            ready = self.transfer.copy(held, rows, piece)
            rows.num_filled = max(rows.num_filled, piece.position + piece.stop - piece.start)
            if piece.position == 0:
                rows.pieces = []  # retracted: from the start again
            rows.pieces.append(piece.stop - piece.start)
            if rows.complete:
                own = {"rid": rows.rid, "num_tokens": str(rows.num_tokens), "pieces": json.dumps(rows.pieces)}
                self.writer.submit(rows, self.metadata | own, ready)
        self.transfer.keep(held)

    def problem(self, request) -> str | None:
        """Why a finished request has no dump; None when its dump is there or on its way."""
        rows = getattr(request, "hs_rows", None)
        if rows is None:
            return "no forward pass of this request was seen (a prefill CUDA graph?)"
        if rows.error:
            return rows.error
        if not rows.submitted:
            return f"only {rows.num_filled} of {rows.num_tokens} rows were seen (a prefill CUDA graph?)"
        return self.writer.failure

    def _pieces(self, forward: Forward) -> list[tuple[RequestRows, Piece]]:
        pieces, row = [], 0
        # Attention-DP gives a rank without requests a dummy batch: lengths, but no rids.
        for rid, prefix, extend in zip(forward.rids, forward.prefix_lens, forward.extend_lens, strict=False):
            rows = self._rows.get(rid) if rid.startswith(RID_PREFIX) else None
            if rows is not None and not rows.submitted and rows.error is None:
                try:
                    piece = place(row, prefix, extend, rows.num_tokens, rows.num_filled)
                except GapError as error:
                    rows.error, piece = str(error), None
                if piece is not None:
                    pieces.append((rows, piece))
            row += extend
        # Requests that end here go first: they free their slab while the unfinished one still needs its own.
        return sorted(pieces, key=lambda item: item[1].position + item[1].stop - item[1].start < item[0].num_tokens)

    def _tensors(self, forward: Forward, pieces: list) -> dict[str, torch.Tensor | list[torch.Tensor]] | None:
        num_rows = forward.final.shape[0]
        try:
            aux = self.tap.take(num_rows) if self.tap else list(forward.aux)
            if len(aux) != self.num_aux or any(tensor.shape[0] != num_rows for tensor in aux):
                shapes = [tuple(tensor.shape) for tensor in aux]
                raise UnsupportedModel(f"the model handed out {shapes}, not {self.num_aux} times [{num_rows}, H]")
            tensors = {"input_ids": forward.input_ids, "aux": aux, "final": forward.final}
            if any(rows.wants_all for rows, _ in pieces):
                tensors["hidden"] = self.all_tap.take(num_rows)
        except UnsupportedModel as error:
            for rows, _ in pieces:
                rows.error = str(error)
            return None
        return tensors

    def _open(self, rows: RequestRows, tensors: dict) -> bool:
        if rows.slab is not None:
            return True
        shapes = {}
        for name, value in tensors.items():
            if name == "hidden" and not rows.wants_all:
                continue
            layered = isinstance(value, list)
            first = value[0] if layered else value
            dtype = torch.int64 if name == "input_ids" else self.dtype
            shapes[name] = (dtype, (len(value), first.shape[-1]) if layered else tuple(value.shape[1:]))
        try:
            rows.open(self.staging, shapes)
        except StagingFull as error:
            rows.error = str(error)
            logger.error("[HS_DUMP] %s: %s", rows.rid, error)
        return rows.error is None


def boundaries_json(boundaries: list[int]) -> dict[str, str]:
    """Dump metadata about layers: boundaries, and the 0-based layers whose outputs they are."""
    return {"boundaries": json.dumps(boundaries), "layers": json.dumps([b - 1 for b in boundaries])}
