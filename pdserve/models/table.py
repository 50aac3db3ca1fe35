"""The families that have a recipe, by the ``model_type`` of their configurations."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pdserve.errors import ModelError
from pdserve.models.families.cohere import Cohere2MoeSettings, Cohere2Settings, CohereSettings
from pdserve.models.families.deepseek import (
    AxK1Settings,
    AxK2Settings,
    BailingHybridSettings,
    DeepseekV2Settings,
    DeepseekV3Settings,
    DeepseekV4Settings,
    DeepseekV32Settings,
    Glm4MoeLiteSettings,
    GlmMoeDsaSettings,
    Hy4Settings,
    Hy4VlTextSettings,
    KimiLinearSettings,
    LongcatFlashSettings,
    MiniCpm3Settings,
    Mistral4Settings,
    MistralLarge4Settings,
    SarvamMlaSettings,
    YoutuSettings,
)
from pdserve.models.families.exaone import Exaone4Settings, ExaoneMoeSettings, ExaoneSettings, KolibriSettings
from pdserve.models.families.gemma import (
    Gemma2Settings,
    Gemma3nSettings,
    Gemma3Settings,
    Gemma4Settings,
    Gemma4UnifiedSettings,
    GemmaSettings,
    MuseGlimmerTextSettings,
    VaultGemmaSettings,
)
from pdserve.models.families.glm import (
    AfmoeSettings,
    Dots1Settings,
    Glm4MoeSettings,
    Glm4Settings,
    Glm4vMoeTextSettings,
    Glm4vTextSettings,
    Glm5NextTextSettings,
    GlmSettings,
    Hy3Settings,
    LagunaSettings,
    MimoV2FlashSettings,
    SarvamMoeSettings,
    SolarOpenSettings,
    Step3p5Settings,
)
from pdserve.models.families.gpt import (
    FalconSettings,
    Gpt2Settings,
    GptBigCodeSettings,
    GptJSettings,
    GptNeoXSettings,
    GptOssSettings,
    Jais2Settings,
    NemotronSettings,
    OptSettings,
    PersimmonSettings,
    StableLmSettings,
    Starcoder2Settings,
)
from pdserve.models.families.lfm import Lfm2MoeSettings, Lfm2Settings, Lfm3Settings
from pdserve.models.families.llama import (
    ApertusSettings,
    ArceeSettings,
    CwmSettings,
    ErnieMoeSettings,
    ErnieSettings,
    GraniteMoeSettings,
    GraniteMoeSharedSettings,
    GraniteMoeSwaSettings,
    GraniteSettings,
    GraniteSwaSettings,
    HeliumSettings,
    HunYuanMoeSettings,
    HunYuanSettings,
    HyperClovaXSettings,
    InternLm3Settings,
    IQuestCoderSettings,
    Llama4Settings,
    LlamaSettings,
    MiniMaxM2Settings,
    MiniMaxM3Settings,
    MiniMaxSettings,
    Ministral3Settings,
    MinistralSettings,
    MistralSettings,
    MixtralSettings,
    MllamaTextSettings,
    NanoChatSettings,
    SeedOssSettings,
    SmolLm3Settings,
)
from pdserve.models.families.mamba import (
    BambaSettings,
    FalconH1Settings,
    FalconMambaSettings,
    GraniteHybridSettings,
    JambaSettings,
    Mamba2Settings,
    MambaSettings,
    NemotronHSettings,
)
from pdserve.models.families.olmo import (
    FlexOlmoSettings,
    Olmo2Settings,
    Olmo3Settings,
    OlmoeSettings,
    OlmoHybridSettings,
    OlmoSettings,
)
from pdserve.models.families.phi import Phi3Settings, PhiSettings
from pdserve.models.families.qwen import (
    FlintSettings,
    LaraMiniSettings,
    Qwen2MoeSettings,
    Qwen2Settings,
    Qwen2VlTextSettings,
    Qwen3MoeSettings,
    Qwen3NextSettings,
    Qwen3OmniMoeTextSettings,
    Qwen3Settings,
    Qwen3VlMoeTextSettings,
    Qwen3VlTextSettings,
    Qwen4ExpSettings,
    Qwen25OmniTextSettings,
    Qwen35MoeSettings,
    Qwen35Settings,
)
from pdserve.models.families.settings import FamilySettings

FAMILIES: dict[str, type[FamilySettings]] = {
    "llama": LlamaSettings,
    "llama4_text": Llama4Settings,
    "mistral": MistralSettings,
    "ministral": MinistralSettings,
    "ministral3": Ministral3Settings,
    "mistral4": Mistral4Settings,
    "mixtral": MixtralSettings,
    "qwen2": Qwen2Settings,
    "qwen2_moe": Qwen2MoeSettings,
    "qwen3": Qwen3Settings,
    "qwen3_moe": Qwen3MoeSettings,
    "flint": FlintSettings,
    "gpt_oss": GptOssSettings,
    "qwen3_next": Qwen3NextSettings,
    "qwen3_5_text": Qwen35Settings,
    "qwen3_5_moe_text": Qwen35MoeSettings,
    "qwen4_exp_text": Qwen4ExpSettings,
    "lara_mini": LaraMiniSettings,
    "lfm2": Lfm2Settings,
    "lfm2_moe": Lfm2MoeSettings,
    "lfm3": Lfm3Settings,
    "granitemoehybrid": GraniteHybridSettings,
    "bamba": BambaSettings,
    "nemotron_h": NemotronHSettings,
    "deepseek_v2": DeepseekV2Settings,
    "deepseek_v3": DeepseekV3Settings,
    "deepseek_v32": DeepseekV32Settings,
    "glm_moe_dsa": GlmMoeDsaSettings,
    "glm4_moe_lite": Glm4MoeLiteSettings,
    "axk1": AxK1Settings,
    "axk2": AxK2Settings,
    "deepseek_v4": DeepseekV4Settings,
    "hy_v4": Hy4Settings,
    "kimi_linear": KimiLinearSettings,
    "bailing_hybrid": BailingHybridSettings,
    "longcat_flash": LongcatFlashSettings,
    "sarvam_mla": SarvamMlaSettings,
    "minicpm3": MiniCpm3Settings,
    "youtu": YoutuSettings,
    "falcon_h1": FalconH1Settings,
    "mamba": MambaSettings,
    "falcon_mamba": FalconMambaSettings,
    "mamba2": Mamba2Settings,
    "jamba": JambaSettings,
    "gemma": GemmaSettings,
    "gemma2": Gemma2Settings,
    "gemma3_text": Gemma3Settings,
    "gemma3n_text": Gemma3nSettings,
    "gemma4_text": Gemma4Settings,
    "gemma4_unified_text": Gemma4UnifiedSettings,
    "vaultgemma": VaultGemmaSettings,
    "phi": PhiSettings,
    "phi3": Phi3Settings,
    "glm": GlmSettings,
    "glm4": Glm4Settings,
    "glm4_moe": Glm4MoeSettings,
    "solar_open": SolarOpenSettings,
    "sarvam_moe": SarvamMoeSettings,
    "mimo_v2_flash": MimoV2FlashSettings,
    "olmo": OlmoSettings,
    "olmo2": Olmo2Settings,
    "olmo3": Olmo3Settings,
    "olmo_hybrid": OlmoHybridSettings,
    "olmoe": OlmoeSettings,
    "flex_olmo": FlexOlmoSettings,
    "cohere": CohereSettings,
    "cohere2": Cohere2Settings,
    "cohere2_moe": Cohere2MoeSettings,
    "granite": GraniteSettings,
    "granitemoe": GraniteMoeSettings,
    "granitemoeshared": GraniteMoeSharedSettings,
    "granitemoe_swa": GraniteMoeSwaSettings,
    "granite_swa": GraniteSwaSettings,
    "smollm3": SmolLm3Settings,
    "exaone": ExaoneSettings,
    "exaone4": Exaone4Settings,
    "exaone_moe": ExaoneMoeSettings,
    "kolibri1": KolibriSettings,
    "seed_oss": SeedOssSettings,
    "ernie4_5": ErnieSettings,
    "ernie4_5_moe": ErnieMoeSettings,
    "hunyuan_v1_dense": HunYuanSettings,
    "hunyuan_v1_moe": HunYuanMoeSettings,
    "hy_v3": Hy3Settings,
    "afmoe": AfmoeSettings,
    "laguna": LagunaSettings,
    "iquestcoder": IQuestCoderSettings,
    "dots1": Dots1Settings,
    "hyperclovax": HyperClovaXSettings,
    "apertus": ApertusSettings,
    "nanochat": NanoChatSettings,
    "minimax": MiniMaxSettings,
    "minimax_m2": MiniMaxM2Settings,
    "arcee": ArceeSettings,
    "helium": HeliumSettings,
    "cwm": CwmSettings,
    "internlm3": InternLm3Settings,
    "starcoder2": Starcoder2Settings,
    "stablelm": StableLmSettings,
    "nemotron": NemotronSettings,
    "jais2": Jais2Settings,
    "persimmon": PersimmonSettings,
    "gpt_neox": GptNeoXSettings,
    "gpt2": Gpt2Settings,
    "gpt_bigcode": GptBigCodeSettings,
    "gptj": GptJSettings,
    "opt": OptSettings,
    "falcon": FalconSettings,
}
"""The settings of each family. ``fallback`` takes the others."""


@dataclass(frozen=True, slots=True)
class Composite:
    """A model that takes more than text, and has a model of text within it."""

    text: str
    """The family of its text part if the file does not say it."""
    tied: bool | None = None
    """Whether its head is tied if the file does not say it of the whole; None if it is tied, too, if the part is."""

    flat: bool = False
    """Whether older files have the settings of the text part among those of the whole."""


TEXT_PARTS: dict[str, type[FamilySettings]] = {
    "qwen2_vl_text": Qwen2VlTextSettings,
    "qwen2_5_vl_text": Qwen2VlTextSettings,
    "qwen2_5_omni_text": Qwen25OmniTextSettings,
    "qwen3_vl_text": Qwen3VlTextSettings,
    "qwen3_vl_moe_text": Qwen3VlMoeTextSettings,
    "qwen3_omni_moe_text": Qwen3OmniMoeTextSettings,
    "hy_v4_vl_text": Hy4VlTextSettings,
    "granite4_vision_text": GraniteSettings,
    "glm4v_text": Glm4vTextSettings,
    "glm4v_moe_text": Glm4vMoeTextSettings,
    "minimax_m3_vl_text": MiniMaxM3Settings,
    "mistral_large4_text": MistralLarge4Settings,
    "mllama_text_model": MllamaTextSettings,
    "muse_glimmer_text": MuseGlimmerTextSettings,
    "step3p5": Step3p5Settings,
    "glm5_next_text": Glm5NextTextSettings,
}
"""The settings of families that there are within composite models alone."""

COMPOSITES: dict[str, Composite] = {
    "gemma3": Composite("gemma3_text", tied=True),
    "gemma3n": Composite("gemma3n_text", tied=True),
    "gemma4": Composite("gemma4_text", tied=True),
    "gemma4_unified": Composite("gemma4_unified_text", tied=True),
    "muse_glimmer": Composite("muse_glimmer_text", tied=False),
    "minimax_m3_vl": Composite("minimax_m3_vl_text"),
    "mistral3": Composite("mistral", tied=True),
    "mistral_large4": Composite("mistral_large4_text", tied=False),
    "llama4": Composite("llama4_text", tied=False),
    "mllama": Composite("mllama_text_model"),
    "llava": Composite("llama"),
    "llava_next": Composite("llama"),
    "llava_next_video": Composite("llama"),
    "llava_onevision": Composite("qwen2"),
    "vipllava": Composite("llama"),
    "internvl": Composite("qwen2", tied=True),
    "aya_vision": Composite("cohere2", tied=True),
    "cohere2_vision": Composite("cohere2", tied=True),
    "smolvlm": Composite("llama"),
    "idefics3": Composite("llama"),
    "qwen2_vl": Composite("qwen2_vl_text", flat=True),
    "qwen2_5_vl": Composite("qwen2_5_vl_text", flat=True),
    "qwen2_5_omni": Composite("qwen2_5_omni_text", tied=False),
    "qwen2_5_omni_thinker": Composite("qwen2_5_omni_text", tied=False),
    "qwen3_omni_moe": Composite("qwen3_omni_moe_text", tied=False),
    "qwen3_omni_moe_thinker": Composite("qwen3_omni_moe_text", tied=False),
    "qwen3_vl": Composite("qwen3_vl_text", tied=False),
    "qwen3_vl_moe": Composite("qwen3_vl_moe_text", tied=False),
    "qwen3_5": Composite("qwen3_5_text", tied=False),
    "qwen3_5_moe": Composite("qwen3_5_moe_text", tied=False),
    "qwen4_exp": Composite("qwen4_exp_text", tied=False),
    "kimi_k25": Composite("deepseek_v3", tied=True),
    "lfm2_vl": Composite("lfm2", tied=True),
    "lfm3_vl": Composite("lfm3", tied=True),
    "exaone4_5": Composite("exaone4", tied=False),
    "hyperclovax_vision_v2": Composite("hyperclovax", tied=True),
    "minicpmv4_6": Composite("qwen3_5_text", tied=False),
    "minicpmv4_7": Composite("qwen3_5_text", tied=False),
    "step3p7": Composite("step3p5"),
    "glm5_next": Composite("glm5_next_text", tied=False, flat=True),
    "hy_v4_vl": Composite("hy_v4_vl_text", tied=False),
    "nemotron_h_omni": Composite("nemotron_h"),
    "granite4_vision": Composite("granite4_vision_text", tied=False),
    "glmga": Composite("glm4v_text"),
    "glm46v": Composite("glm4v_text"),
    "glm4v": Composite("glm4v_text"),
    "glm4v_moe": Composite("glm4v_moe_text"),
}
"""Models whose text part is served, if it has a recipe, by their ``model_type``."""


def family_of(model_type: str, layer_types: object) -> str:
    """Returns the family of a configuration with these two settings."""
    if model_type == "kimi_k2":
        return "deepseek_v3"
    # transformers, too, takes a Mistral whose file names kinds of layers for a Ministral.
    return "ministral" if model_type == "mistral" and layer_types is not None else model_type


def settings_from_json(family: str, text: bytes | msgspec.Raw) -> FamilySettings:
    """Reads a family's settings. Raises ModelError if one has a value that it cannot have."""
    try:
        return msgspec.json.decode(text, type=(FAMILIES | TEXT_PARTS)[family])
    except msgspec.DecodeError as exc:
        raise ModelError(str(exc)) from exc


def settings_from_values(family: str, values: dict[str, object]) -> FamilySettings:
    """Takes a family's settings out of a dictionary. Raises ModelError if one has a value that it cannot have."""
    try:
        return msgspec.convert(values, (FAMILIES | TEXT_PARTS)[family])
    except msgspec.ValidationError as exc:
        raise ModelError(str(exc)) from exc
