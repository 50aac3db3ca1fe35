"""Has the architectures of GGUF files as tables: the family of each, and what its keys and tensors are called there.

A file says by its tensors which projections are fused or biased, and whether the head is the embedding. All else about
a family is in its own module: names of tensors come from its recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.models.recipe import NormOrder

_NOTHING: Mapping[str, object] = {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a file of an architecture has otherwise than the checkpoint that it was made of."""

    family: str
    with_experts: str = ""
    """The family of a file that has experts, if that is another one."""
    with_windows: str = ""
    """The family of a file that has a sliding window, if that is another one."""
    with_positions: str = ""
    """The family of a file whose attention knows positions, if that is another one; ``KNOWS_POSITIONS`` says which."""
    with_inner_norms: str = ""
    """The family of a file whose states have norms of their own; ``INNER_NORMS`` says which."""
    with_sigmoids: str = ""
    """The family of a file whose experts are chosen by sigmoids, if that is another one."""
    latents: bool = False
    """Whether keys and values come from latents. ``latents`` reads such files."""
    permuted: bool = False
    """Whether the rows of queries and keys are stored so that the two halves of each head alternate."""
    shifted_norms: bool = False
    """Whether norms are stored as they are applied, where the checkpoint has their difference from one."""
    norms: tuple[str, ...] = ()
    """The names of a layer's norms, if they are not the usual ones for their number and order."""
    last_norm: str = "output_norm"
    """The name of the norm before the head."""
    tiled: bool = False
    """Whether value heads of a delta net are stored as the first of each key head, then the second of each."""
    all_experts: bool = False
    """Whether every layer has experts, so that a file may lack ``feed_forward_length``."""
    required: tuple[str, ...] = ()
    """Keys of numbers above 0, without which layers with a state or a window have no size."""
    of_layers: tuple[str, ...] = ()
    """Keys with a number for each layer, which is 0 for a layer without the part that it is of."""
    unread: tuple[str, ...] = ()
    """What keys begin with that belong to parts which no layer has: their tensors would be refused."""
    settings: Mapping[str, object] = field(default_factory=lambda: _NOTHING)
    """Settings of the family that files have no key for."""
    rounded_ramps: bool = True
    """Whether the ramp of yarn begins and ends at whole channels; no key says so."""
    only: Mapping[str, object] = field(default_factory=lambda: _NOTHING)
    """Keys whose one value is all that the family computes."""
    alike: tuple[str, ...] = ()
    """Other families that files hold, too. They are read as one of those above, which computes the same."""

    @property
    def families(self) -> frozenset[str]:
        """The families that files of this architecture may have."""
        of_parts = {self.with_experts, self.with_sigmoids, self.with_windows, self.with_inner_norms}
        return frozenset({self.family, self.with_positions, *of_parts, *self.alike} - {""})


OF_CHANNELS = tuple(f"ssm.{name}" for name in ("conv_kernel", "inner_size", "state_size", "time_step_rank"))
"""The keys of a Mamba whose channels have numbers of their own."""
STATE_SPACE = (*OF_CHANNELS, "ssm.group_count")
SHORT_CONV = ("shortconv.l_cache",)
DELTA_OF_CHANNELS = ("kda.head_dim", "ssm.conv_kernel")
KNOWS_POSITIONS = "rope.scaling.finetuned"
"""The key of a Granite that says whether attention knows positions. It has no effect elsewhere."""
INNER_NORMS = "ssm.dt_b_c_rms"
"""The key of a Mamba that says whether what its states are made of is normalised."""
KV_HEADS, CHANNELS = "attention.head_count_kv", "feed_forward_length"
WINDOW = "attention.sliding_window"
BEFORE_BOTH = ("attn_norm", "post_attention_norm")
OF_IMAGES = ("n_deepstack_layers", "rope.dimension_sections")
"""Keys by which images are placed. The three axes of a text's positions are equal."""


ARCHITECTURES: dict[str, Architecture] = {
    # No key says that embeddings are scaled, nor which layers see all: one in four, unless a file says otherwise.
    "afmoe": Architecture(
        "afmoe",
        required=(WINDOW,),
        settings={"mup_enabled": True, "global_attn_every_n_layers": 4},
        only={"attention.sliding_window_pattern": 4},
    ),
    "apertus": Architecture("apertus"),
    "arcee": Architecture("arcee", permuted=True),
    "chatglm": Architecture("glm"),
    "cohere2": Architecture("cohere2"),
    "command-r": Architecture("cohere"),
    "deepseek2": Architecture(
        "youtu", with_experts="deepseek_v2", with_sigmoids="deepseek_v3", latents=True, alike=("glm4_moe_lite",)
    ),
    "deepseek32": Architecture("deepseek_v32", with_experts="deepseek_v32", with_sigmoids="deepseek_v32", latents=True),
    "dots1": Architecture("dots1"),
    "ernie4_5": Architecture("ernie4_5"),
    "ernie4_5-moe": Architecture("ernie4_5_moe"),
    "exaone": Architecture("exaone"),
    "exaone4": Architecture("exaone4"),
    "exaone-moe": Architecture("exaone_moe"),
    # The factors of a Falcon-H1 are in its weights.
    "falcon-h1": Architecture("falcon_h1", required=STATE_SPACE),
    "falcon": Architecture("falcon", norms=("attn_norm_2", "attn_norm")),
    "gemma": Architecture("gemma", shifted_norms=True),
    "gemma2": Architecture("gemma2", shifted_norms=True),
    "gemma3": Architecture("gemma3_text", shifted_norms=True),
    "gemma3n": Architecture("gemma3n_text"),
    "gemma4": Architecture("gemma4_text", alike=("gemma4_unified_text",)),
    "glm-dsa": Architecture("glm_moe_dsa", with_experts="glm_moe_dsa", with_sigmoids="glm_moe_dsa", latents=True),
    "glm4": Architecture("glm4"),
    "glm4moe": Architecture("glm4_moe", norms=BEFORE_BOTH),
    "gpt-oss": Architecture("gpt_oss", norms=BEFORE_BOTH, rounded_ramps=False),
    "gpt2": Architecture("gpt2"),
    "gptneox": Architecture("gpt_neox"),
    # A Granite 4 without layers that have a state is written so, and says of how many numbers these would be.
    "granite": Architecture(
        "granite", permuted=True, unread=("ssm.",), only={KNOWS_POSITIONS: 1}, alike=("granitemoehybrid",)
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid", with_positions="bamba", permuted=True, required=STATE_SPACE, of_layers=(KV_HEADS,)
    ),
    "granitemoe": Architecture(
        "granitemoeshared", permuted=True, unread=("ssm.",), only={KNOWS_POSITIONS: 1}, alike=("granitemoe",)
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", only={"expert_shared_count": 1}),
    "internlm2": Architecture("llama", permuted=True),
    "jais2": Architecture("jais2"),
    "jamba": Architecture("jamba", required=OF_CHANNELS, of_layers=(KV_HEADS,)),
    "kimi-linear": Architecture(
        "kimi_linear",
        with_experts="kimi_linear",
        with_sigmoids="kimi_linear",
        latents=True,
        required=DELTA_OF_CHANNELS,
        of_layers=(KV_HEADS,),
    ),
    # The file counts channels as they are, and the checkpoint before they are adjusted.
    "lfm2": Architecture(
        "lfm2",
        last_norm="token_embd_norm",
        settings={"block_auto_adjust_ff_dim": False},
        required=SHORT_CONV,
        of_layers=(KV_HEADS,),
    ),
    "lfm2moe": Architecture("lfm2_moe", last_norm="token_embd_norm", required=SHORT_CONV, of_layers=(KV_HEADS,)),
    "llama": Architecture("llama", with_experts="mixtral", permuted=True, alike=("internlm3",)),
    "llama4": Architecture("llama4_text"),
    "mamba": Architecture("mamba", with_inner_norms="falcon_mamba", required=OF_CHANNELS, unread=(CHANNELS,)),
    "mamba2": Architecture("mamba2", required=STATE_SPACE, unread=(CHANNELS,)),
    "mimo2": Architecture("mimo_v2_flash", required=(WINDOW,), only={"expert_weights_norm": 1}),
    "minicpm3": Architecture("minicpm3", latents=True),
    "minimax-m2": Architecture("minimax_m2"),
    "mistral3": Architecture("ministral3", permuted=True),
    "mistral4": Architecture("mistral4", with_experts="mistral4", with_sigmoids="mistral4", latents=True),
    "nemotron": Architecture("nemotron", shifted_norms=True),
    "nemotron_h": Architecture("nemotron_h", permuted=True, required=STATE_SPACE, of_layers=(KV_HEADS, CHANNELS)),
    "nemotron_h_moe": Architecture(
        "nemotron_h",
        permuted=True,
        required=STATE_SPACE,
        of_layers=(KV_HEADS, CHANNELS),
        only={"expert_shared_count": 1},
    ),
    "olmo": Architecture(
        "olmo", permuted=True, only={"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 0.0}
    ),
    "olmo2": Architecture("olmo2", with_windows="olmo3"),
    "olmoe": Architecture("olmoe"),
    "phi2": Architecture("phi"),
    "phi3": Architecture("phi3"),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe"),
    "qwen2vl": Architecture("qwen2", unread=OF_IMAGES),
    "qwen3": Architecture("qwen3"),
    "qwen35": Architecture("qwen3_5_text", shifted_norms=True, norms=BEFORE_BOTH, tiled=True, required=STATE_SPACE),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        shifted_norms=True,
        norms=BEFORE_BOTH,
        tiled=True,
        all_experts=True,
        required=STATE_SPACE,
    ),
    "qwen3moe": Architecture("qwen3_moe", settings={"norm_topk_prob": True}),
    "qwen3next": Architecture(
        "qwen3_next",
        shifted_norms=True,
        norms=BEFORE_BOTH,
        settings={"norm_topk_prob": True},
        all_experts=True,
        required=STATE_SPACE,
    ),
    "qwen3vl": Architecture("qwen3", unread=OF_IMAGES),
    "qwen3vlmoe": Architecture("qwen3_moe", settings={"norm_topk_prob": True}, unread=OF_IMAGES),
    "seed_oss": Architecture("seed_oss", norms=BEFORE_BOTH),
    "smollm3": Architecture("smollm3", permuted=True),
    "stablelm": Architecture("stablelm"),
    "step35": Architecture("step3p5", shifted_norms=True, required=(WINDOW,), only={"moe_every_n_layers": 1}),
    "starcoder": Architecture("gpt_bigcode"),
    "starcoder2": Architecture("starcoder2"),
}
"""What is known of each architecture, by the name that files have in ``general.architecture``."""

SETTINGS: dict[str, tuple[str, ...]] = {
    "altup.active_idx": ("altup_active_idx",),
    "altup.num_inputs": ("altup_num_inputs",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.indexer.head_count": ("index_n_heads",),
    "attention.indexer.key_length": ("index_head_dim",),
    "attention.indexer.top_k": ("index_topk",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.scale": ("attention_multiplier",),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "attention.value_scale": ("attention_value_scale",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "embedding_scale": ("embedding_multiplier",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "share_expert_dim",
        "moe_shared_expert_intermediate_size",
    ),
    "expert_used_count": ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "full_attention_interval": ("full_attention_interval",),
    "interleave_moe_layer_step": ("moe_layer_interval", "interleave_moe_layer_step"),
    "kda.head_dim": ("linear_head_dim",),
    "leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "residual_scale": ("residual_multiplier",),
    "rope.freq_base_swa": ("rope_local_base_freq",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"),
    "ssm.group_count": ("linear_num_key_heads", "mamba_n_groups", "n_groups"),
    "ssm.state_size": ("linear_key_head_dim", "mamba_d_state", "ssm_state_size", "state_size"),
    "ssm.time_step_rank": ("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "time_step_rank"),
    "swiglu_clamp_exp": ("swiglu_limits",),
    "swiglu_clamp_shexp": ("swiglu_limits_shared",),
    "use_parallel_residual": ("use_parallel_residual",),
}
"""The settings that a key sets: those of these names that the family has. A key that sets none is not supported."""

REQUIRED = ("attention.head_count", "context_length", "embedding_length", "feed_forward_length")
EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
"""One of these is required, too."""
REQUIRED_OF_EXPERTS = ("expert_count", "expert_used_count")
READ_OTHERWISE = frozenset(
    {
        "attention.key_length",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attention.value_length",
        "block_count",
        "nextn_predict_layers",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.attn_factor",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_ext_factor",
    }
)
"""Keys that set no single setting of a family."""
OF_GROWING_QUERIES = frozenset({"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"})
"""Keys of a family whose queries grow with their positions."""
WITHOUT_EFFECT = frozenset({"rope.scaling.finetuned", "tensor_data_layout", "vocab_size"})
NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "expert_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Values of keys that stand for what a family without such a setting computes."""

OF_UNLIKE_HEADS = frozenset(
    {
        "attention.key_length_swa",
        "attention.value_length_swa",
        "rope.dimension_count_swa",
        "rope.freq_base_swa",
    }
)
"""Keys of windows in a Gemma 4, whose other layers have heads of another size."""
OF_FAMILIES: dict[str, frozenset[str]] = {
    "gemma4_text": OF_UNLIKE_HEADS,
    "mimo_v2_flash": frozenset({"rope.freq_base_swa"}),
    "ministral3": OF_GROWING_QUERIES,
    "mistral4": frozenset({"attention.temperature_length", "attention.temperature_scale"}),
    "step3p5": frozenset({"rope.freq_base_swa"}),
}
"""Keys that only the files of these families may have."""

COMPUTED: dict[str, tuple[str, ...]] = {
    "activation_sparsity_scale": ("activation_sparsity_pattern",),
    "attention.indexer.types": ("indexer_types",),
    "attention.key_length_mla": ("kv_lora_rank",),
    "attention.q_lora_rank": ("kv_lora_rank",),
    "attention.value_length_mla": ("kv_lora_rank",),
    "attention.recurrent_layers": ("full_attention_interval",),
    "leading_dense_block_count": ("moe_layers_enum",),
    INNER_NORMS: ("time_step_rank",),
    "ssm.inner_size": ("linear_value_head_dim", "mamba_d_head", "mamba_head_dim", "mamba_dt_rank", "state_size"),
    "ssm.time_step_rank": ("mamba_dt_rank", "state_size"),
}
"""Keys that ``settings``, ``states`` and ``latents`` read, for families that have one of these settings."""

OUTER = {"token_embd": "embedding", "output": "head"}
"""The fields of a ``ModelRecipe`` that have the names of a file's tensors."""
NORMS = {
    NormOrder.PRE: ("attn_norm", "ffn_norm"),
    NormOrder.POST: ("post_attention_norm", "post_ffw_norm"),
    NormOrder.SANDWICH: ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
    NormOrder.PARALLEL: ("attn_norm", "ffn_norm"),
}
"""The usual names of a layer's norms, in the order in which recipes have them."""
ATTENTION = {"attn_q": "query", "attn_k": "key", "attn_v": "value", "attn_output": "out", "attn_qkv": "fused"}
"""The fields of an ``AttentionRecipe``."""
PER_LAYER = {
    "per_layer_token_embd": "embedding",
    "per_layer_model_proj": "projection",
    "per_layer_proj_norm": "norm",
}
"""The fields of a ``PerLayerEmbedding``."""
PER_LAYER_INPUT = {"inp_gate": "down", "proj": "up", "post_norm": "norm"}
"""The fields of a ``PerLayerInput``."""
ALTUP = {
    "altup_correct_coef": "correction_coefs",
    "altup_predict_coef": "prediction_coefs",
    "altup_router": "modality_router",
    "altup_router_norm": "router_norm",
}
"""The tensors of an ``AltUpRecipe`` within a layer."""
ALTUP_SCALE = ("altup_correct_scale.weight", "correct_output_scale")
"""One of them that has no ``.weight`` behind its name in a checkpoint."""
ALTUP_ENDS = {"altup_proj.weight": "before", "altup_unembd_proj.weight": "behind"}
"""The fields of an ``AltUpRecipe`` of products that are one tensor here."""
LOW_RANK = {"laurel_l": "down", "laurel_r": "up", "laurel_post_norm": "norm"}
"""The fields of a ``LowRankRecipe``."""
BESIDE_EXPERTS = {
    "ffn_norm": "before_mlp",
    "post_ffw_norm_1": "after_mlp",
    "pre_ffw_norm_2": "before_experts",
    "post_ffw_norm_2": "after_experts",
}
"""The norms of an ``MlpBesideExperts``."""
FEED_FORWARD = {"ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down"}
"""The fields of an ``MlpRecipe``."""
PART_OF_EXPERTS, PART_OF_SHARED = "_exps", "_shexp"
"""What is added to these names where all experts, or the shared ones, are meant."""
