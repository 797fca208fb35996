"""Small models of transformers of the kinds that tensor parallelism meets, and what plain torch makes of them."""

import torch

from groups import Later

hf = Later("transformers")
VOCABULARY, SAMPLES, STEPS, RATE = 37, 8, 3, 0.1
SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0}
KEYS = SHAPE | {"num_key_value_heads": 2}
LATENT = KEYS | {"num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 14, "qk_nope_head_dim": 4}
LATENT |= {"qk_rope_head_dim": 2, "v_head_dim": 4, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"first_k_dense_replace": 1, "moe_intermediate_size": 12, "num_experts_per_tok": 2}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2(dropout: float = 0.0) -> torch.nn.Module:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **drops))


MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**KEYS)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**KEYS)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**KEYS, sliding_window=16)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**KEYS, head_dim=4)),
    "gpt2": gpt2,
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SHAPE, **QUIET)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**KEYS)),
    "neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SHAPE)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**KEYS, head_dim=4)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, vocab_size=VOCABULARY, dropout_rate=0.0)
    ),
    "deepseek2": lambda: hf.DeepseekV2ForCausalLM(hf.DeepseekV2Config(**LATENT, first_k_dense_replace=2)),
    "deepseek2, whole queries": lambda: hf.DeepseekV2ForCausalLM(
        hf.DeepseekV2Config(**LATENT | {"q_lora_rank": None, "v_head_dim": 6}, first_k_dense_replace=2)
    ),
    "deepseek2, experts": lambda: hf.DeepseekV2ForCausalLM(
        hf.DeepseekV2Config(**LATENT, **EXPERTS, n_routed_experts=4, attention_bias=True)
    ),
    "deepseek3": lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**LATENT, first_k_dense_replace=2)),
    "deepseek3, three heads": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **LATENT | {"num_attention_heads": 3, "num_key_value_heads": 3, "v_head_dim": 8}, first_k_dense_replace=2
        )
    ),
    "deepseek3, experts": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(**LATENT, **EXPERTS, n_routed_experts=8, n_group=2, topk_group=1)
    ),
    "minicpm3": lambda: hf.MiniCPM3ForCausalLM(hf.MiniCPM3Config(**LATENT)),
    "llama4": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(
            **KEYS, head_dim=4, intermediate_size_mlp=24, num_local_experts=2, interleave_moe_layer_step=1
        )
    ),
    "aria": lambda: hf.AriaTextForCausalLM(
        hf.AriaTextConfig(**KEYS, moe_num_experts=2, moe_topk=1, moe_num_shared_experts=1)
    ),
    "granite": lambda: hf.GraniteMoeSharedForCausalLM(
        hf.GraniteMoeSharedConfig(**KEYS, num_local_experts=2, num_experts_per_tok=1, shared_intermediate_size=24)
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**KEYS, num_local_experts=2)),
}


def built(kind: str) -> torch.nn.Module:
    torch.manual_seed(7)
    model = MODELS[kind]()
    model.config.use_cache = False
    with torch.no_grad():  # norms that are all ones or zeros would hide what is done with them
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand_like(parameter) / 4)
    return model


def batch(step: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1, VOCABULARY, (SAMPLES, length), generator=generator)


def reference(kind: str, length: int) -> tuple[list, list, dict, dict]:
    """One process, plain torch: losses, norms, values before and how far each parameter has moved."""
    model = built(kind)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    rule, losses, norms = torch.optim.SGD(model.parameters(), lr=RATE), [], []
    for step in range(STEPS):
        rule.zero_grad()
        tokens = batch(step, length)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        rule.step()
        losses.append(loss.item())
    return losses, norms, before, {name: value.detach() - before[name] for name, value in model.named_parameters()}
