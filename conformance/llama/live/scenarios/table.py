"""The table of all API scenarios."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import get_args

from conformance.llama.live.comparison import Comparison
from conformance.llama.zoo.load import SPLIT_LAYER, SPLIT_TENSOR

from . import adapters, batches, contexts, encoders, memories, outputs, positions, speculative, splits, states
from .harness import PROMPT, Harness, Kind

_ALL: tuple[Kind, ...] = get_args(Kind)
_MEMORY: tuple[Kind, ...] = ("attention", "recurrent", "hybrid", "encoder-decoder")
_CACHE: tuple[Kind, ...] = ("attention", "hybrid", "encoder-decoder")
_BOTH: tuple[Kind, ...] = ("encoder-decoder",)
_DECODER: tuple[Kind, ...] = ("attention", "recurrent", "hybrid")
_POOLED: tuple[Kind, ...] = ("encoder", *_DECODER)
_STATE: tuple[Kind, ...] = ("recurrent", "hybrid")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Two call sequences of llama.cpp that must agree."""

    name: str
    does: str
    """Description."""
    kinds: tuple[Kind, ...]
    """Kinds of models to which it applies."""
    play: Callable[[Harness], Iterator[Comparison]]
    parts: int = 1
    """Number of processes that run one after the other."""


# fmt: off
_ROWS = (
    # states
    Scenario("state-same", "a state is saved, and loaded into its context after other tokens", _MEMORY, states.same),
    Scenario("state-fresh", "a state is loaded into a new context", _MEMORY, states.fresh),
    Scenario("state-larger", "a state is loaded into a context of twice the cells", _MEMORY, states.larger),
    Scenario("state-3", "the state of 3 sequences is loaded into a new context", _MEMORY, states.several),
    Scenario("state-process", "a state is loaded in a new process", _MEMORY, states.process, parts=2),
    Scenario("state-file", "a prompt-cache file is written and loaded, with its tokens", _MEMORY, states.file),
    Scenario("state-seq", "one of 2 sequences is saved, removed and loaded", _MEMORY, states.seq),
    Scenario("state-seq-other", "a sequence is saved and loaded under another id", _MEMORY, states.seq_other),
    Scenario("state-seq-unified", "a sequence is loaded under another id (one stream)", _MEMORY, states.seq_unified),
    Scenario("state-seq-file", "a sequence is saved to a file and loaded under another id", _MEMORY, states.seq_file),
    Scenario("state-seq-device", "a sequence is saved on the device and loaded again", _MEMORY, states.seq_device),
    Scenario("state-checkpoint", "a partial state is loaded, rejected drafts are removed", _MEMORY, states.checkpoint),
    Scenario("state-fragmented", "a sequence is loaded into cells between those of another", _CACHE, states.fragmented),
    Scenario("state-snapshots", "a state with snapshots is loaded", _STATE, states.snapshots),
    Scenario("state-snapshots-drafts", "drafts of a loaded state are rejected", _STATE, states.loaded_drafts),
    *(Scenario(f"state-cut-{name}", f"a sequence's state without its {end} is refused", _DECODER,
           partial(states.refused_seq, spoil=partial(states.cut, parts=parts)))
      for name, end, parts in (("head", "later seven eighths", 8), ("half", "later half", 2), ("tail", "end", -8))),
    Scenario("state-cut-whole", "half of a context's state is refused", _DECODER,
             partial(states.refused, spoil=partial(states.cut, parts=2))),
    Scenario("state-other-model", "a state with another architecture's name is refused", _DECODER, states.other_model),
    Scenario("state-other-types", "a sequence with keys of another type is refused", _CACHE, states.other_types),
    # memory
    Scenario("seq-cp", "a sequence is copied to another stream", _MEMORY, partial(memories.cp, unified=False)),
    Scenario("seq-cp-unified", "a sequence is copied within a stream", _MEMORY, partial(memories.cp, unified=True)),
    Scenario("seq-rm-tail", "the last tokens are removed", _MEMORY, partial(memories.rm_tail, n=PROMPT, gone=0)),
    Scenario("seq-rm-long", "11 of 57 tokens are removed", _MEMORY, partial(memories.rm_tail, n=57, gone=11)),
    Scenario("seq-rm-whole", "a sequence is removed and its id reused", _MEMORY, partial(memories.rm_whole, n=57)),
    Scenario("seq-rm-all", "all sequences are removed by the id -1", _MEMORY, memories.rm_all),
    Scenario("seq-rm-all-unified", "all are removed (one stream)", _MEMORY, partial(memories.rm_all, unified=True)),
    Scenario("drafts", "2 of 4 drafts are accepted, three times", _MEMORY, memories.drafts),
    Scenario("drafts-snapshots", "rejected drafts are undone by snapshots of states", _STATE, memories.snapshots),
    Scenario("seq-keep", "one of 3 sequences is kept", _MEMORY, partial(memories.keep, unified=False)),
    Scenario("seq-keep-unified", "one of 3 is kept (one stream)", _MEMORY, partial(memories.keep, unified=True)),
    Scenario("seq-add", "all positions are shifted", _CACHE, memories.add),
    Scenario("seq-add-back", "positions are shifted up and back", _CACHE, memories.add_back),
    Scenario("seq-div", "positions are divided by 2, or moved one by one", _CACHE, memories.div),
    Scenario("shift", "the first tokens are removed and the others move to 0", _CACHE, memories.shift),
    Scenario("clear", "a memory is cleared, without its bytes", _MEMORY, partial(memories.clear, data=False)),
    Scenario("clear-data", "a memory is cleared with its bytes", _MEMORY, partial(memories.clear, data=True)),
    Scenario("coupled", "2 sequences share tokens in one stream", _MEMORY, memories.coupled),
    # drafts
    Scenario("draft-context", "another context drafts, rejected drafts are removed", _MEMORY,
             partial(speculative.drafted, model=False)),
    Scenario("draft-model", "another model drafts, rejected drafts are removed", _MEMORY,
             partial(speculative.drafted, model=True)),
    Scenario("draft-2", "drafts of 2 sequences are verified in a batch", _MEMORY,
             partial(speculative.several, unified=False)),
    Scenario("draft-2-unified", "drafts of 2 sequences in a batch (one stream)", _MEMORY,
             partial(speculative.several, unified=True)),
    Scenario("mtp-layer", "an MTP layer, and a layer of the model with its weights", _DECODER, speculative.layer),
    Scenario("mtp-batch", "an MTP layer reads a text in a batch, and token by token", _DECODER, speculative.batch),
    Scenario("mtp-states", "hidden states of all tokens, and of a few", _DECODER, speculative.rows),
    Scenario("mtp-2", "an MTP layer reads 2 sequences in a batch, and each alone", _DECODER, speculative.sequences),
    Scenario("mtp-drafts", "an MTP layer drafts, rejected drafts are removed", _DECODER, speculative.rounds),
    Scenario("mtp-saved", "the state of an MTP context is loaded into a new one", _DECODER, speculative.state),
    Scenario("mtp-layers", "a context switches between MTP layers", _DECODER, speculative.heads),
    # batches
    Scenario("batch-1", "1 sequence in a context for 2, and alone", _ALL, partial(batches.together, seqs=(0,))),
    *(Scenario(f"batch-{n}", f"{n} sequences in a batch, and each alone", _ALL,
                partial(batches.together, seqs=range(n)))
      for n in (2, 3, 4, 8)),
    Scenario("batch-4-alike", "4 sequences of one length", _ALL,
         partial(batches.together, seqs=range(4), same_length=True)),
    Scenario("batch-3-unified", "3 sequences in one stream, and each alone", _MEMORY,
         partial(batches.together, seqs=range(3), unified=True)),
    Scenario("slots-0-2", "sequences 0 and 2 of 3 in one batch", _ALL, partial(batches.together, seqs=(0, 2))),
    Scenario("slots-1-3", "sequences 1 and 3 of 4 in one batch", _ALL, partial(batches.together, seqs=(1, 3))),
    Scenario("needle", "64 sequences that differ in their first token", _MEMORY, partial(batches.needle, n=64)),
    Scenario("ubatch", "a prompt in graphs of 8 tokens", _MEMORY, partial(batches.ubatch, n=8)),
    Scenario("ubatch-3", "3 prompts in graphs of 6 tokens", _DECODER, batches.ubatch_several),
    Scenario("chunks", "a prompt in 2 batches, and token by token", _MEMORY, batches.chunks),
    Scenario("unified", "3 sequences in one stream, and each in its own", _MEMORY, batches.unified),
    Scenario("sets", "batches of one shape with other sequences", _MEMORY, partial(batches.sets, unified=False)),
    Scenario("sets-unified", "batches of other sequences (one stream)", _MEMORY, partial(batches.sets, unified=True)),
    # positions
    Scenario("refused-batches", "batches that are refused change nothing", _MEMORY, positions.refused),
    Scenario("causal-off", "spans that are not causal, together and alone", _DECODER[::2],
             partial(positions.causal, unified=False)),
    Scenario("causal-off-unified", "spans that are not causal (one stream)", _DECODER[::2],
             partial(positions.causal, unified=True)),
    Scenario("cells", "each cell of a context is filled", _CACHE, positions.cells),
    Scenario("seqs-most", "as many sequences as llama.cpp allows", _DECODER, positions.sequences),
    # contexts
    Scenario("contexts-2", "2 contexts on one model decode in turn", _ALL, contexts.two),
    Scenario("contexts-threads", "2 contexts on one model decode in 2 threads", _ALL, contexts.in_threads),
    Scenario("in-flight", "a sequence is saved, removed and loaded while graphs run", _MEMORY, contexts.in_flight),
    Scenario("loads", "a model is loaded 3 times, and freed while its last graph runs", _ALL, contexts.loads),
    Scenario("written", "a model is written by llama.cpp, and loaded", _ALL, contexts.written),
    Scenario("sizes", "small and large texts in one context", _ALL, contexts.sizes),
    Scenario("op-offload", "without op_offload", _ALL, partial(contexts.other, op_offload=0)),
    Scenario("offload-kqv", "without offload_kqv", _ALL, partial(contexts.other, offload_kqv=0)),
    Scenario("threads", "with 3 threads", _ALL, contexts.threads),
    Scenario("larger", "contexts with 1 and 4 times the cells", _MEMORY, contexts.larger),
    Scenario("flash-attn", "without flash attention", _ALL, contexts.flash_attn),
    Scenario("full", "a batch without enough free cells changes nothing", _CACHE, contexts.full),
    # models over several devices
    Scenario("split-even", "each tensor on 2 devices", _ALL,
             partial(splits.split, mode=SPLIT_TENSOR, shares=((1, 1),))),
    Scenario("split-uneven", "each tensor on 2 or 3 devices in uneven shares", _ALL,
             partial(splits.split, mode=SPLIT_TENSOR, shares=splits.UNEVEN)),
    Scenario("split-zero", "each tensor on devices one of which has a share of 0", _ALL,
             partial(splits.split, mode=SPLIT_TENSOR, shares=splits.ZERO)),
    Scenario("split-layers", "layers on 2 or 3 devices, also with a share of 0", _ALL,
             partial(splits.split, mode=SPLIT_LAYER, shares=splits.UNEVEN + splits.ZERO)),
    Scenario("split-rm", "tokens are removed from a split model", _MEMORY, splits.rm),
    Scenario("split-cp", "a sequence of a split model is copied to another stream", _MEMORY,
             partial(splits.cp, unified=False)),
    Scenario("split-cp-unified", "a sequence of a split model is copied within a stream", _MEMORY,
             partial(splits.cp, unified=True)),
    Scenario("split-shift", "positions of a split model are shifted", _CACHE, splits.shift),
    Scenario("split-state", "the state of a split model is loaded under other shares", _MEMORY, splits.state),
    Scenario("split-state-seq", "a sequence of a split model is loaded under other shares", _MEMORY, splits.state_seq),
    # an encoder beside a decoder
    Scenario("encode-twice", "a decoder starts again after one encoding", _BOTH, encoders.twice),
    Scenario("encode-again", "another text replaces the encoded one", _BOTH, encoders.again),
    Scenario("encode-2", "2 sequences read texts in a batch, and each alone", _BOTH, encoders.together),
    # adapters
    Scenario("lora-removed", "an adapter is set and removed", _ALL, adapters.removed),
    Scenario("lora-scaled", "an adapter at half its scale, and at scale 0", _ALL, adapters.scaled),
    Scenario("lora-2", "2 adapters together equal one adapter", _ALL, adapters.both),
    Scenario("lora-many", "40 adapters together equal one adapter", _ALL, partial(adapters.many, n=40)),
    Scenario("lora-changed", "adapters change between batches of one shape", _ALL, adapters.changed),
    Scenario("lora-merged", "adapters of each kind of weights, and weights with them added", _ALL,
           partial(adapters.merged, kinds=("layers", "experts", "router", "head"))),
    Scenario("lora-merged-embeddings", "an adapter of token embeddings, and embeddings with it added", _ALL,
           partial(adapters.merged, kinds=("embeddings",))),
    Scenario("lora-unfit", "adapters that do not fit are refused", _ALL, adapters.unfit),
    Scenario("lora-unfit-experts", "an adapter of half the experts is refused", _ALL, adapters.unfit_experts),
    Scenario("cvec-removed", "a control vector is set and removed", _MEMORY, adapters.steered),
    Scenario("cvec-changed", "control vectors change between batches of one shape", _MEMORY, adapters.resteered),
    # inputs and outputs
    Scenario("embeddings-in", "rows of the token embedding in place of tokens", _MEMORY, outputs.embeddings_in),
    Scenario("embeddings-out", "embeddings are enabled, then disabled", _MEMORY, outputs.asked),
    Scenario("outputs", "outputs of all tokens, of a few, of the last", _MEMORY, outputs.every),
    *(Scenario(f"pooling-{name}", f"pooling {name} on the device, and computed on the host", _POOLED,
           partial(outputs.pooling, pooling_type=kind))
      for name, kind in outputs.POOLINGS.items()),
    *(Scenario(f"pooling-{name}-unified", f"pooling {name} (one stream)", _DECODER,
           partial(outputs.pooling, pooling_type=kind, unified=True))
      for name, kind in outputs.POOLINGS.items()),
    Scenario("sampler", "a greedy sampler on the device", _MEMORY, outputs.greedy),
    Scenario("sampler-chains", "chains of samplers on the device, and on the host", _MEMORY, outputs.chains),
)
# fmt: on
SCENARIOS: dict[str, Scenario] = {v.name: v for v in _ROWS}
"""Name -> scenario."""
