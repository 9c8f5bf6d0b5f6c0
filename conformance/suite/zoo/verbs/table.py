"""Every verb, in one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import get_args

from . import adapters, batches, contexts, encoders, memories, outputs, states
from .desk import PROMPT, Desk, Kind, Pair

_ALL: tuple[Kind, ...] = get_args(Kind)
_MEMORY: tuple[Kind, ...] = ("attention", "recurrent", "hybrid", "encoder-decoder")
_CACHE: tuple[Kind, ...] = ("attention", "hybrid", "encoder-decoder")
_BOTH: tuple[Kind, ...] = ("encoder-decoder",)
_DECODER: tuple[Kind, ...] = ("attention", "recurrent", "hybrid")
_STATE: tuple[Kind, ...] = ("recurrent", "hybrid")


@dataclass(frozen=True, slots=True)
class Verb:
    """A relation between two ways through llama.cpp."""

    name: str
    does: str
    """What, in a sentence."""
    kinds: tuple[Kind, ...]
    """Which models it makes sense for."""
    play: Callable[[Desk], Iterator[Pair]]
    parts: int = 1
    """Processes that it takes, one after the other."""


# fmt: off
_ROWS = (
    # states
    Verb("state-same", "a state is saved, and loaded into its context after other tokens", _MEMORY, states.same),
    Verb("state-fresh", "a state is loaded into a new context", _MEMORY, states.fresh),
    Verb("state-larger", "a state is loaded into a context of twice the cells", _MEMORY, states.larger),
    Verb("state-3", "the state of 3 sequences is loaded into a new context", _MEMORY, states.several),
    Verb("state-process", "a state is loaded in a new process", _MEMORY, states.process, parts=2),
    Verb("state-file", "a prompt-cache file is written and loaded, with its tokens", _MEMORY, states.file),
    Verb("state-seq", "one of 2 sequences is saved, removed and loaded", _MEMORY, states.seq),
    Verb("state-seq-other", "a sequence is saved and loaded under another id", _MEMORY, states.seq_other),
    Verb("state-seq-unified", "the same in one stream of cells", _MEMORY, states.seq_unified),
    Verb("state-seq-file", "a file of one sequence is loaded under another id", _MEMORY, states.seq_file),
    Verb("state-seq-device", "a sequence's state stays on the device meanwhile", _MEMORY, states.seq_device),
    Verb("state-checkpoint", "a partial state is loaded and rejected drafts are removed", _MEMORY, states.checkpoint),
    Verb("state-fragmented", "a sequence is loaded into cells between those of another", _CACHE, states.fragmented),
    # memory
    Verb("seq-cp", "a sequence is copied to another stream", _MEMORY, partial(memories.cp, unified=False)),
    Verb("seq-cp-unified", "a sequence is copied within a stream", _MEMORY, partial(memories.cp, unified=True)),
    Verb("seq-rm-tail", "the last tokens are removed", _MEMORY, partial(memories.rm_tail, n=PROMPT, gone=0)),
    Verb("seq-rm-long", "11 of 57 tokens are removed", _MEMORY, partial(memories.rm_tail, n=57, gone=11)),
    Verb("seq-rm-whole", "a sequence is removed and its id begins anew", _MEMORY, partial(memories.rm_whole, n=57)),
    Verb("seq-rm-all", "all sequences are removed by the id -1", _MEMORY, memories.rm_all),
    Verb("seq-rm-all-unified", "the same in one stream of cells", _MEMORY, partial(memories.rm_all, unified=True)),
    Verb("drafts", "of 4 drafts 2 are accepted, three times", _MEMORY, memories.drafts),
    Verb("drafts-snapshots", "drafts are rejected by snapshots of recurrent states", _STATE, memories.snapshots),
    Verb("seq-keep", "one sequence of 3 is kept", _MEMORY, partial(memories.keep, unified=False)),
    Verb("seq-keep-unified", "the same in one stream of cells", _MEMORY, partial(memories.keep, unified=True)),
    Verb("seq-add", "positions move, which are relative", _CACHE, memories.add),
    Verb("seq-add-back", "positions move up and back", _CACHE, memories.add_back),
    Verb("seq-div", "positions are divided by 2, or moved one by one", _CACHE, memories.div),
    Verb("shift", "the first tokens are removed and the others move to 0", _CACHE, memories.shift),
    Verb("clear", "a memory is cleared but for its bytes", _MEMORY, partial(memories.clear, data=False)),
    Verb("clear-data", "a memory is cleared with its bytes", _MEMORY, partial(memories.clear, data=True)),
    Verb("coupled", "2 sequences share tokens in one stream", _MEMORY, memories.coupled),
    # batches
    Verb("batch-1", "1 sequence where 2 might be, as alone", _ALL, partial(batches.together, seqs=(0,))),
    *(Verb(f"batch-{n}", f"{n} sequences in one batch are each alone", _ALL, partial(batches.together, seqs=range(n)))
      for n in (2, 3, 4, 8)),
    Verb("batch-4-alike", "4 sequences of one length", _ALL, partial(batches.together, seqs=range(4), alike=True)),
    Verb("batch-3-unified", "3 sequences in one stream are each alone", _MEMORY,
         partial(batches.together, seqs=range(3), unified=True)),
    Verb("slots-0-2", "sequences 0 and 2 of 3 in one batch", _ALL, partial(batches.together, seqs=(0, 2))),
    Verb("slots-1-3", "sequences 1 and 3 of 4 in one batch", _ALL, partial(batches.together, seqs=(1, 3))),
    Verb("needle", "64 sequences that differ in their first token", _MEMORY, partial(batches.needle, n=64)),
    Verb("ubatch", "a prompt in graphs of 8 tokens", _MEMORY, partial(batches.ubatch, n=8)),
    Verb("ubatch-3", "3 prompts in graphs of 6 tokens", _DECODER, batches.ubatch_several),
    Verb("chunks", "a prompt in 2 batches, and token by token", _MEMORY, batches.chunks),
    Verb("unified", "3 sequences in one stream, or in one each", _MEMORY, batches.unified),
    Verb("sets", "batches of one shape with other sequences", _MEMORY, partial(batches.sets, unified=False)),
    Verb("sets-unified", "the same in one stream of cells", _MEMORY, partial(batches.sets, unified=True)),
    # contexts
    Verb("contexts-2", "2 contexts on one model decode in turn", _ALL, contexts.two),
    Verb("sizes", "small and large texts in one context", _ALL, contexts.sizes),
    Verb("op-offload", "without op_offload", _ALL, partial(contexts.other, op_offload=0)),
    Verb("offload-kqv", "without offload_kqv", _ALL, partial(contexts.other, offload_kqv=0)),
    Verb("threads", "with 3 threads", _ALL, contexts.threads),
    Verb("larger", "with 4 times the cells", _MEMORY, contexts.larger),
    Verb("flash-attn", "without flash attention", _ALL, contexts.flash_attn),
    Verb("full", "a batch for which there is no room changes nothing", _CACHE, contexts.full),
    # an encoder beside a decoder
    Verb("encode-twice", "a decoder begins anew, with what its encoder read", _BOTH, encoders.twice),
    Verb("encode-again", "another text replaces what the encoder read", _BOTH, encoders.again),
    Verb("encode-2", "2 sequences read texts in one batch, each as alone", _BOTH, encoders.together),
    # adapters
    Verb("lora-removed", "an adapter is set and removed", _ALL, adapters.removed),
    Verb("lora-scaled", "half of an adapter, and none", _ALL, adapters.scaled),
    Verb("lora-2", "2 adapters are one of both ranks", _ALL, adapters.both),
    Verb("lora-many", "40 adapters, each a part of one", _ALL, partial(adapters.many, n=40)),
    Verb("lora-changed", "adapters change between batches of one shape", _ALL, adapters.changed),
    Verb("cvec-removed", "a control vector is set and removed", _MEMORY, adapters.steered),
    Verb("cvec-changed", "control vectors change between batches of one shape", _MEMORY, adapters.resteered),
    # inputs and outputs
    Verb("embeddings-in", "rows of the token embedding in place of tokens", _MEMORY, outputs.embeddings_in),
    Verb("embeddings-out", "embeddings are asked for, then no more", _MEMORY, outputs.asked),
    Verb("outputs", "results of all tokens, of a few, of the last", _MEMORY, outputs.every),
    *(Verb(f"pooling-{name}", f"pooling {name} is the same on the host", ("encoder",),
           partial(outputs.pooling, pooling_type=kind))
      for name, kind in (("mean", outputs.MEAN), ("cls", outputs.CLS), ("last", outputs.LAST))),
    Verb("sampler", "a greedy sampler on the device", _MEMORY, outputs.greedy),
)
# fmt: on
VERBS: dict[str, Verb] = {v.name: v for v in _ROWS}
"""Name -> verb."""
