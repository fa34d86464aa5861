"""Tables of the names that people use for arguments, sizes, weights and parts."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

# role of an argument -> names, in lower case without underscores
ARGUMENTS = {
    "q": "q query queries qs queryvec xq querystates qmat",
    "k": "k key keys ks xk keystates kmat",
    "v": "v value values vs xv valuestates vmat",
    "x": "x xs inputs input inp hiddenstates hidden h src tgt trg seq embeddings embedding emb sequence target scores "
    "logits z a arr array vec tensor xin xinput dec decinput",
    "memory": "memory context encout encoderout encoutput encoderoutput encoderoutputs source kv mem enc xkv ctx cond "
    "xsrc srcx encx",
    "mask": "mask attnmask attentionmask srcmask tgtmask trgmask causalmask keypaddingmask paddingmask srcpaddingmask "
    "selfmask lookaheadmask padmask keymask targetmask m decmask encmask bias attnbias additivemask maskbias",
    "memory_mask": "memorymask crossmask encdecmask encoderdecodermask crossattnmask contextmask",
    "causal": "causal iscausal usecausal masked autoregressive usecausalmask usemask",
    "weights_too": "returnweights needweights returnattn returnattention returnattentionweights outputattentions",
    "dropout": "dropout dropoutp p drop droprate dropoutrate attndropout pdrop dropprob attnpdrop residpdrop embdpdrop",
    "training": "training train istraining",
    "axis": "axis dim",
    "eps": "eps epsilon e",
    "gamma": "gamma g weight scale w alpha gain a2",
    "beta": "beta b bias shift b2 offset",
    "cache": "cache kvcache past pastkeyvalue pastkeyvalues layerpast pastkv state pastkvs",
    "positions": "positions pos positionids inputpos tokenpositions startpos offset position positionid",
    "tokens": "tokens ids idx inputids tokenids x src batch seq sequences inputs seqq seqk",
    "targets": "targets target labels y tgt trg",
    "lengths": "lengths lens validlens seqlens seqlengths validlen length",
    "pad": "pad padid padidx padtoken padtokenid padindex",
    "length": "n t l size length seqlen maxlen numpositions seqlength sequencelength maxlength positions pos sz "
    "blocksize ntokens numtokens maxseqlen contextlength queries numpos",
    "keys_length": "m s keys keylen klen",
}
# size -> names of the constructor's arguments, of config fields and of globals
SIZES = {
    "D": "dmodel dim embeddim nembd hiddensize embdim embeddingdim embedsize d modeldim features normalizedshape size "
    "embsize nembed numhiddens demb width emb din inputdim indim dout querysize keysize valuesize c channels dimension "
    "queryinputdim nstate statesize hiddensz embeddingsize ndim shape dmod infeatures outfeatures dimin dimout outdim "
    "contextdim querydim keydim valuedim kdim vdim layershape decoderdim encoderdim inputsize ninp dinput "
    "doutput embeddingdimension",
    "H": "heads numheads nheads nhead h numattentionheads head numberofheads headcount headsnum "
    "queryheads headnum nheadscross",
    "G": "kvheads nkvheads numkvheads nkvhead numkeyvalueheads groups ngroups numgroups "
    "numkvgroups kvgroups nkv kvhead",
    "K": "headsize headdim dk dhead dv dkey dvalue dimhead dimperhead",
    "F": "dff ff ffdim hiddendim dimfeedforward dhidden ffndim mlpdim intermediatesize innerdim dinner ffsize hidden "
    "ffnhidden ffhidden dinnerhid feedforwarddim ffnnumhiddens hiddenfeatures",
    "V": "v vocabsize vocab nvocab numtokens ntoken srcvocabsize tgtvocabsize srcvocab tgtvocab vocabularysize voc "
    "ntokens vocsize",
    "L": "maxlen blocksize contextlength maxseqlen seqlen maxlength nctx contextsize maxpositionembeddings "
    "maxpositions ctxlen maxsequencelength maxseqlength contextlen maxposition length t numpositions maxpos "
    "contextwindow sequencelength maxcontext numpatches",
    "N": "numlayers nlayers nlayer layers depth numblocks n nblocks numencoderlayers numdecoderlayers",
    "expansion": "expansion expand mult forwardexpansion ffnmultiplier expansionfactor ffmult mlpratio",
    "dropout": ARGUMENTS["dropout"],
    "rope_base": "base theta ropetheta ropebase thetabase ropethetabase freqbase",
}
# which part the name of a function or class suggests; the first match wins
PARTS = (
    ("backward", r"backward|grad|_bwd|test_|loss|train|plot|^main$|generate|sample"),
    ("mixer", r"mamba|\bssm|lstm|\bgru|short_?conv|linear_?att|linformer|longformer|retention|hyena|latent_?att|^mla$"),
    ("flops", r"flops"),
    ("heat_map", r"heat_?map"),
    ("position_likeness", r"likeness|position_similarity"),
    (
        "lm",
        r"^(gpt|minigpt|nanogpt|tinygpt|llama|transformer_?lm|lm|language_?model|bigram|decoder_?only.*)\d*"
        r"(_?(model|lm|language_?model))?$|language_?model|transformer_lm|_lm$|^(gpt|llama).*model|^transformer$",
    ),
    ("decoder_block", r"decoder_?(layer|block)|^(decoder|gpt|llama)?_?block$|transformer_?block|pre_?norm_?block"),
    ("encoder_block", r"encoder_?(layer|block)|^layer$|post_?norm_?block|transformer_?layer"),
    ("encoder", r"^(transformer)?_?encoder(_?stack)?$"),
    (
        "causal_mask",
        r"causal_?mask|subsequent_?mask|look_?ahead|future_?mask|no_?peek|tril_?mask|autoregressive_?mask"
        r"|triangular_?mask|square_subsequent|subsequent$",
    ),
    ("padding_mask", r"pad(ding)?_?mask|mask_?pad|length(s)?_?(to_)?mask|sequence_?mask|make_src_mask|key_?mask"),
    ("rotary", r"ro_?pe(?!r)|rotary|rotate(?!_?(half|every|back))"),
    ("learned", r"learn(ed|able)_?pos|learned_?pe"),
    ("sinusoidal", r"sinus|pos(ition(al)?)?_?enc(oding)?|^pe$|positional|get_pe|pos_?emb"),
    ("rms_norm", r"rms"),
    ("layer_norm", r"layer_?norm|^ln$|^norm(alize)?$"),
    ("swiglu", r"swi_?glu|gated|llama_?(mlp|ffn|feed)|geglu"),
    ("feed_forward", r"feed_?for?ward|^mo_?e$|^ffn?$|^mlp$|ffn$|mlp$|position_?wise|^ffn?_|_ff$"),
    (
        "multi_head",
        r"multi_?(query|head)|multihead|mha|grouped|gqa|mqa|self_?att|cross_?att|causal_?.*att|masked_?att"
        r"|^head$|att(entio)?n_?(head|layer|block)|single_?head",
    ),
    ("attention", r"scaled_?dot|^sdpa?$|dot_?product|^attention$|^attend$|attn$|attention"),
    ("softmax", r"soft_?max"),
    ("lm", r"gpt|llama|transformer"),
)


def normalize_name(name: str) -> str:
    return name.lower().replace("_", "")


@lru_cache(maxsize=4096)
def role_of(name: str, among: tuple[str, ...] | None = None) -> str | None:
    """Return the role that an argument's name suggests, among the given roles."""
    for role in among or tuple(ARGUMENTS):
        if normalize_name(name) in ARGUMENTS[role].split():
            return role
    return None


# patterns for names that are not in SIZES; the first match wins
SIZE_PATTERNS = (
    ("dropout", r"drop"),
    ("V", r"vocab"),
    ("G", r"(kv|key_?value)_?(head|group)"),
    ("K", r"head_?(dim|size|width)|dim_?head|^d_?head|^d_(val|key|query|q)$"),
    ("rope_base", r"rope_?\w*(theta|base)|(theta|freq)_?base"),
    ("H", r"(^|_)(num|n|number_of|att\w*|self)_?heads?$|heads$"),
    (
        "F",
        r"(ff|ffn|feed_?forward|mlp|inner|intermediate|hidden)_?\w*(dim|size|hidden|width|units|features)|num_ff$"
        r"|^d_hid|dim_?(inner|hidden|ff)",
    ),
    ("N", r"(^|_)(num|n)_\w*(layers?|blocks?)$|depth$"),
    ("L", r"(max|seq|ctx|context|block)_?\w*(len|length|size|positions?)$"),
    ("D", r"(model|embed|embedding|emb|token)_?(dim|size|width)$"),
)


@lru_cache(maxsize=4096)
def size_of(name: str) -> str | None:
    """Return the size that an argument's name suggests."""
    for size, names in SIZES.items():
        if normalize_name(name) in names.split():
            return size
    return next((size for size, pattern in SIZE_PATTERNS if re.search(pattern, name.lower())), None)


# arguments that do not change what the part computes: name -> value
NEUTRAL: tuple[tuple[str, Any], ...] = (
    (r"^temperature$", "temperature"),  # √d_k, the divisor of the scores
    (r"^device$", "cpu"),
    (r"^activation$|^act(_?fn)?$", "relu"),
    (r"^dtype$|mode$|^cache$|past|kv_?cache|^state$|rel_?pos|rng|generator", None),
    (r"bias$|affine$|proj_?out|use_?proj", True),
    (r"(layer|block)_?(id|idx|index|num|number|i)$|^(idx|index|i)$|pad\w*_?(id|idx|index|token)?$|start_?pos", 0),
    (r"^multiple_?of$", 4),
    (r"batch_?size|^bsz?$|^active$|top_?k$|per_tok(en)?$", 2),
    (r"experts$|latent_?dim$|rank$|(plain|nope|rope|rotary)_?dim$", 4),
    (r"eps(ilon)?$", 1e-5),
    (r"(init|std|initializer)\w*(range|std|scale)?$|^std$|^gain$", 0.02),
    (r"^(use|is|has|with|enable|return|need|output|add|apply)_|_?flag$|causal|flash|verbose", False),
)


def neutral_value(name: str, annotation: str = "") -> tuple[bool, Any]:
    """Return True and a value for an argument that does not change what the part computes, or else False."""
    for pattern, value in NEUTRAL:
        if re.search(pattern, name.lower()):
            return True, value
    if re.search(r"Optional|\bNone\b", annotation):
        return True, None
    return (True, False) if annotation in ("bool", "<class 'bool'>") else (False, None)


WIDTH = r"dim|size|width|channels|features|embed|hidden|units"


def assign_sizes(names: list[str], owner: str = "") -> dict[str, str]:
    """Return argument -> size for a constructor. `hidden_dim` is the model width if nothing else is."""
    found = {name: size for name in names if (size := size_of(name)) is not None}
    if "D" not in found.values():
        widths = [n for n in names if found.get(n) == "F"] or [
            n for n in names if n not in found and re.search(WIDTH, n.lower())
        ]
        single = [n for n in names if n in ("k", "e", "m")]  # `SelfAttention(k, heads)`
        found |= dict.fromkeys((widths or single)[:1], "D")
    return found


# classes that stand beside a model and carry its name
AROUND_MODELS = r"(embedd?ings?|tokeni[sz]er|classifi\w*|heads?|outputs?|pooler|dataset|trainer|state|utils)$"


def part_of(name: str) -> str | None:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")
    for part, pattern in PARTS:
        if re.search(pattern, snake):
            return None if part == "backward" or (part == "lm" and re.search(AROUND_MODELS, snake)) else part
    return None


FILLERS = {
    "w",
    "weight",
    "weights",
    "proj",
    "projection",
    "linear",
    "lin",
    "fc",
    "to",
    "layer",
    "mat",
    "matrix",
    "net",
    "map",
    "b",
    "bias",
    "c",
    "dense",
    "heads",
    "head",
    "linears",
    "attn",
    "attention",
    "mha",
    "sa",
    "self",
}
ROLES = {
    "q": {"q", "query", "queries", "wq", "toqueries", "toquery", "toq"},
    "k": {"k", "key", "keys", "wk", "tokeys", "tokey", "tok"},
    "v": {"v", "value", "values", "wv", "tovalues", "tovalue", "tov"},
    "o": {
        "o",
        "out",
        "output",
        "wo",
        "final",
        "unify",
        "unifyheads",
        "concat",
        "combine",
        "result",
        "mix",
        "toout",
        "proj",
    },
    "qkv": {"qkv", "wqkv", "kqv", "in", "toqkv"},
    "kv": {"kv", "wkv", "tokv"},
}


def weight_role(path: str) -> str | None:
    """Return the role of an attention weight by its path: `heads.0.W_q.weight` -> "q"."""
    path = re.sub(r"\.(data|value|val|array|tensor|params?)$", "", path)
    last = re.sub(r"(?i)[._](weights?|bias|w|b|kernel|matrix|mat|param)$|^(weight|bias)s?$", "", path)
    words = re.split(r"[._]", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last.split(".")[-1]).lower())
    if words and words[0].isdigit() and "." in last:
        words = re.split(r"_", last.split(".")[-2].lower())
    joined = "".join(words)
    for role, names in ROLES.items():
        if joined in names or re.fullmatch(f"[wb]?_?({'|'.join(names)})(proj|linear|net|weight|bias|s)?", joined):
            return role
    rest = [word for word in words if word not in FILLERS and not word.isdigit()]
    for role, names in ROLES.items():
        if len(rest) >= 1 and rest[0] in names:
            return role
    if not rest:
        return "qkv" if "attn" in words else "o"
    return None
