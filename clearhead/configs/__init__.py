"""The description of an architecture: frozen data, one class per part, no torch.

The config tree is the module tree. A variant is a different part in the same place, never a flag in a shared part;
every part knows the names and shapes of its own weights and the steps of its own computation.
"""

from .attention import AttentionConfig, SinksConfig
from .base import Config, ConfigError, Part, Scope, Step, dumps, loads, read
from .data import BytePairConfig, BytesConfig, CharactersConfig, TokenizerConfig, TokenizerFileConfig
from .decoding import DecodingConfig, LengthPenalty, Power, Wu
from .disentangled import DisentangledAttentionConfig, DistanceVectorsConfig
from .embedding import (
    AudioEmbeddingConfig,
    BorrowedEmbeddingConfig,
    EmbeddingConfig,
    FactoredEmbeddingConfig,
    PatchEmbeddingConfig,
    TokenEmbeddingConfig,
    WidenedEmbeddingConfig,
)
from .ffn import (
    ClampedFeedForwardConfig,
    FeedForwardConfig,
    GatedFeedForwardConfig,
    SwitchedFeedForwardConfig,
)
from .heads import (
    ClassHeadConfig,
    FirstTokenConfig,
    HeadConfig,
    LastTokenConfig,
    LMHeadConfig,
    MaskedLMHeadConfig,
    MeanPoolConfig,
    PoolerConfig,
    SpanHeadConfig,
    TokenClassHeadConfig,
)
from .latent import LatentAttentionConfig
from .linear_attention import DotConfig, EluConfig, FavorConfig, LinearAttentionConfig
from .linformer import LinformerConfig
from .longformer import LongformerConfig
from .lstm import LSTMConfig
from .mamba import MambaConfig
from .mamba2 import Mamba2Config
from .masks import And, Band, Blockwise, Causal, Full, Global, Mask, Or, Scattered, Window
from .mixer import MixerConfig
from .models import EncoderDecoderConfig, ModelConfig, SequenceModelConfig
from .moe import (
    ChoiceConfig,
    GroupedChoiceConfig,
    GroupedSoftmaxChoiceConfig,
    InputWeightedMoEConfig,
    MoEConfig,
    SigmoidChoiceConfig,
    SoftmaxChoiceConfig,
)
from .norm import (
    HeadwiseNormConfig,
    LayerNormConfig,
    NormConfig,
    OffsetRMSNormConfig,
    PlainLayerNormConfig,
    PlainRMSNormConfig,
    ProjectionNormConfig,
    RMSNormConfig,
)
from .positions import AlibiConfig, LearnedConfig, RelativeBiasConfig, SinusoidalConfig
from .precision import PRECISIONS, BFloat16, Blocks, Cache, Float16, Float32, Int4, Int8, Precision, precision
from .rotary import (
    DualChunkConfig,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKScaling,
    QueryScaleConfig,
    RotaryConfig,
    ScalingConfig,
    YarnScaling,
)
from .shortconv import ShortConvConfig
from .stack import BlockConfig, ParallelBlockConfig, SharedStackConfig, StackConfig
from .train import (
    AdamWConfig,
    CosineConfig,
    MuonConfig,
    NoamConfig,
    OptimizerConfig,
    RecipeConfig,
    ScheduleConfig,
    StableConfig,
)

__all__ = [
    "Config", "Part", "ConfigError", "Scope", "Step", "dumps", "loads", "read",
    "Mask", "Full", "Causal", "Window", "Band", "Global", "Scattered", "Blockwise", "And", "Or",
    "NormConfig", "LayerNormConfig", "RMSNormConfig", "OffsetRMSNormConfig", "ProjectionNormConfig",
    "PlainLayerNormConfig", "PlainRMSNormConfig", "HeadwiseNormConfig",
    "SinusoidalConfig", "LearnedConfig", "AlibiConfig", "RelativeBiasConfig",
    "RotaryConfig", "DualChunkConfig", "ScalingConfig", "LinearScaling", "NTKScaling", "YarnScaling", "Llama3Scaling",
    "DynamicScaling", "LongRopeScaling", "QueryScaleConfig",
    "MixerConfig", "AttentionConfig", "SinksConfig", "LatentAttentionConfig", "LongformerConfig", "LSTMConfig",
    "MambaConfig", "Mamba2Config", "DisentangledAttentionConfig", "DistanceVectorsConfig",
    "ShortConvConfig",
    "LinearAttentionConfig", "EluConfig", "FavorConfig", "DotConfig", "LinformerConfig",
    "FeedForwardConfig", "GatedFeedForwardConfig", "ClampedFeedForwardConfig", "SwitchedFeedForwardConfig",
    "MoEConfig", "InputWeightedMoEConfig", "SigmoidChoiceConfig",
    "ChoiceConfig", "SoftmaxChoiceConfig", "GroupedChoiceConfig", "GroupedSoftmaxChoiceConfig",
    "BlockConfig", "ParallelBlockConfig", "StackConfig", "SharedStackConfig",
    "EmbeddingConfig", "TokenEmbeddingConfig", "FactoredEmbeddingConfig", "BorrowedEmbeddingConfig",
    "WidenedEmbeddingConfig", "PatchEmbeddingConfig", "AudioEmbeddingConfig",
    "HeadConfig", "LMHeadConfig", "MaskedLMHeadConfig", "PoolerConfig", "FirstTokenConfig", "LastTokenConfig",
    "MeanPoolConfig", "ClassHeadConfig", "TokenClassHeadConfig", "SpanHeadConfig",
    "ModelConfig", "SequenceModelConfig", "EncoderDecoderConfig",
    "Precision", "Cache", "Float32", "BFloat16", "Float16", "Int8", "Int4", "Blocks", "PRECISIONS", "precision",
    "TokenizerConfig", "BytePairConfig", "CharactersConfig", "BytesConfig", "TokenizerFileConfig",
    "DecodingConfig", "LengthPenalty", "Power", "Wu",
    "RecipeConfig", "OptimizerConfig", "AdamWConfig", "MuonConfig",
    "ScheduleConfig", "CosineConfig", "StableConfig", "NoamConfig",
]  # fmt: skip
