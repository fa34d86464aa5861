"""Dimensions. Every annotation, einsum string and diagram in this package uses these letters.

B batch            T query positions      S key positions (S = T in plain self-attention)
D model width      H query heads          G key/value heads, H = G·R      K key head width   U value head width
V vocabulary       F feed-forward width   E experts    A experts per token
L latent width     Q query latent width    M, N plain and rotary part of a latent head's key, K = M + N
C classes          P patches              Y width of a factored embedding
I inner width of a recurrence              W features of a kernel, or rows that a Linformer reads
Z numbers that a channel remembers         J rank of its step's matrix        O earlier tokens that its filter reads
"""

NAMES = {
    "B": "batch",
    "T": "query positions",
    "S": "key positions",
    "D": "d_model",
    "H": "heads h",
    "G": "key/value heads",
    "K": "d_k",
    "U": "d_v",
    "V": "vocabulary",
    "F": "d_ff",
    "E": "experts",
    "A": "active experts",
    "L": "latent width",
    "Q": "query latent width",
    "M": "plain key width",
    "N": "rotary key width",
    "C": "classes",
    "P": "patches",
    "I": "inner width",
    "W": "features m",
    "Z": "d_state",
    "J": "dt_rank",
    "O": "d_conv − 1",
    "Y": "embedding width",
}
"""What the papers call each letter; `trace` prints both."""
