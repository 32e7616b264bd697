"""Text encoders of transformers, as classifiers of sequences of unequal length; translation; sound and time series."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from tests.zoo.packages.examples import (
    ANSWER,
    BRANCHES,
    CLASSES,
    NOT_APART,
    SAMPLES,
    SMALL,
    SPECIAL,
    TIME,
    TWO_SIDES,
    VOCABULARY,
    Example,
    Named,
    classifier,
    configured,
    encoder,
    labels,
    normal,
    registering,
    token_loss,
    tokens,
    translation,
    waves,
)

network, made = registering("transformers")


made("albert", "ALBERT (Lan et al. 2020): all layers share their weights")(encoder, "Albert", embedding_size=32)
made("bert", "BERT (Devlin et al. 2019)")(encoder, "Bert")
made("big_bird", "BigBird (Zaheer et al. 2020), with full attention, as for texts so short")(
    encoder, "BigBird", attention_type="original_full"
)


@network("CANINE (Clark et al. 2022): characters, hashed, pooled and unpooled")
def canine() -> Example:
    local = {"local_transformer_stride": 8, "upsampling_kernel_size": 4, "num_hash_buckets": 64}
    return encoder("Canine", downsampling_rate=2, num_hash_functions=4, **local)


made("convbert", "ConvBERT (Jiang et al. 2020): convolutions whose kernels are computed")(
    encoder, "ConvBert", embedding_size=64
)
made("deberta", "DeBERTa (He et al. 2021): queries, keys and values of one matrix")(
    encoder, "Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=16
)
made("deberta_v2", "DeBERTa-v2 (He et al. 2021): attention by content and by relative position")(
    encoder, "DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8
)
made("distilbert", "DistilBERT (Sanh et al. 2019)")(
    encoder, "DistilBert", dim=64, n_layers=2, n_heads=4, hidden_dim=128
)
made("electra", "ELECTRA (Clark et al. 2020)")(encoder, "Electra", embedding_size=32)
made("ernie", "ERNIE (Sun et al. 2019)")(encoder, "Ernie")
made("esm", "ESM-2 (Lin et al. 2022): proteins, rotary positions")(
    encoder, "Esm", position_embedding_type="rotary", pad_token_id=0, mask_token_id=3
)


@network("FlauBERT (Le et al. 2020)")
def flaubert() -> Example:
    sizes = {"emb_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64, "num_labels": CLASSES}
    return classifier("Flaubert", True, {**sizes, "n_words": 200})


made("fnet", "FNet (Lee-Thorp et al. 2022): Fourier transforms in place of attention")(
    encoder, "FNet", masked=False, use_tpu_fourier_optimizations=False
)


@network("Funnel-Transformer (Dai et al. 2020): sequences are pooled between blocks")
def funnel() -> Example:
    sizes: dict[str, Any] = {"block_sizes": [1, 1], "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128}
    return classifier("Funnel", True, sizes)


made("ibert", "I-BERT (Kim et al. 2021), not quantised", refused=BRANCHES)(encoder, "IBert", quant_mode=False)
made("layoutlm", "LayoutLM (Xu et al. 2020)")(encoder, "LayoutLM")
made("longformer", "Longformer (Beltagy et al. 2020): windows, and a first token that reads all", refused=BRANCHES)(
    encoder, "Longformer", attention_window=[8, 8]
)
made("megatron_bert", "Megatron-BERT (Shoeybi et al. 2019)")(encoder, "MegatronBert")
made("mobilebert", "MobileBERT (Sun et al. 2020): bottlenecks inside of layers")(
    encoder, "MobileBert", embedding_size=32, intra_bottleneck_size=32, true_hidden_size=32
)


@network("ModernBERT (Warner et al. 2024): rotary positions, a local layer and a global one")
def modernbert() -> Example:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return encoder("ModernBert", global_attn_every_n_layers=2, local_attention=8, **special)


made("mpnet", "MPNet (Song et al. 2020)")(encoder, "MPNet")
made("mra", "MRA (Zeng et al. 2022): attention at several resolutions")(encoder, "Mra", block_per_row=1)


@network("Nystromformer (Xiong et al. 2021): attention through landmarks", refused=NOT_APART)
def nystromformer() -> Example:
    network, (inputs, targets), loss = encoder("Nystromformer", num_landmarks=4, segment_means_seq_len=16)
    return network, ((inputs[0], torch.zeros(SAMPLES, 1, 1, TIME)), targets), loss  # a mask that needs no expansion


@network("Reformer (Kitaev et al. 2020): local attention in reversible layers", refused="is given a module")
def reformer() -> Example:
    sizes = {"attn_layers": ["local", "local"], "feed_forward_size": 128, "local_attn_chunk_length": 8}
    places = {"axial_pos_shape": (4, 4), "axial_pos_embds_dim": (32, 32), "is_decoder": False}
    return classifier("Reformer", True, {**SMALL, "attention_head_size": 16, **sizes, **places, "hash_seed": 0})


made("rembert", "RemBERT (Chung et al. 2021): input and output embeddings of other sizes")(
    encoder, "RemBert", input_embedding_size=32
)
made("roberta", "RoBERTa (Liu et al. 2019)")(encoder, "Roberta")
made("roformer", "RoFormer (Su et al. 2021): rotary positions")(encoder, "RoFormer")
made("squeezebert", "SqueezeBERT (Iandola et al. 2020): grouped convolutions")(
    encoder, "SqueezeBert", embedding_size=64
)


@network("XLM (Lample and Conneau 2019)")
def xlm() -> Example:
    sizes = {"emb_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}
    return classifier("XLM", True, {**sizes, "n_words": 200})


made("xlnet", "XLNet (Yang et al. 2019)")(
    classifier, "XLNet", True, {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128}
)
made("xmod", "X-MOD (Pfeiffer et al. 2022): adapters by language")(encoder, "Xmod", default_language="en_XX")
made("yoso", "YOSO (Zeng et al. 2021): attention by expected hash collisions")(encoder, "Yoso", use_expectation=True)
made("bart", "BART (Lewis et al. 2020)")(
    translation, "Bart", "BartForConditionalGeneration", max_position_embeddings=64, **TWO_SIDES
)
made("t5", "T5 (Raffel et al. 2020): the position bias of the first layer is read by all")(
    translation, "T5", "T5ForConditionalGeneration", d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4
)
made("blenderbot", "Blenderbot (Roller et al. 2021)")(
    translation, "Blenderbot", "BlenderbotForConditionalGeneration", max_position_embeddings=64, **TWO_SIDES
)


@network("FSMT (Ng et al. 2019)", refused=BRANCHES)
def fsmt() -> Example:
    languages: dict[str, Any] = {"src_vocab_size": 200, "tgt_vocab_size": 200, "langs": ["en", "de"]}
    return translation("FSMT", "FSMTForConditionalGeneration", max_position_embeddings=64, **languages, **TWO_SIDES)


@network("LED (Beltagy et al. 2020): Longformer with a decoder", refused=BRANCHES)
def led() -> Example:
    places = {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64, "attention_window": 8}
    return translation("LED", "LEDForConditionalGeneration", **places, **TWO_SIDES)


made("m2m_100", "M2M-100 (Fan et al. 2021)", refused=BRANCHES)(
    translation, "M2M100", "M2M100ForConditionalGeneration", max_position_embeddings=64, **TWO_SIDES
)
made("marian", "Marian (Junczys-Dowmunt et al. 2018)")(
    translation, "Marian", "MarianMTModel", max_position_embeddings=64, **TWO_SIDES
)
made("mbart", "MBART (Liu et al. 2020)")(
    translation, "MBart", "MBartForConditionalGeneration", max_position_embeddings=64, **TWO_SIDES
)
made("mt5", "mT5 (Xue et al. 2021): gated feed-forward layers")(
    translation, "MT5", "MT5ForConditionalGeneration", d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4
)
made("pegasus", "PEGASUS (Zhang et al. 2020)")(
    translation, "Pegasus", "PegasusForConditionalGeneration", max_position_embeddings=64, **TWO_SIDES
)


@network("Whisper (Radford et al. 2023): spectrograms to tokens")
def whisper() -> Example:
    sizes = {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32, "decoder_start_token_id": 1}
    settings = {**TWO_SIDES, **SPECIAL, **sizes, "vocab_size": VOCABULARY}
    model = configured("Whisper", "WhisperForConditionalGeneration", **settings)
    named = Named(model, ("input_features", "decoder_input_ids"), "logits", use_cache=False)
    inputs = (normal(SAMPLES, 16, 40), tokens(SAMPLES, ANSWER, seed=2))
    return named, (inputs, labels(VOCABULARY, SAMPLES, ANSWER)), token_loss


made("wav2vec2", "wav2vec 2.0 (Baevski et al. 2020): a convolution whose weight is normalised")(waves, "Wav2Vec2")


@network("Audio spectrogram transformer (Gong et al. 2021)")
def ast() -> Example:
    sizes = {"patch_size": 8, "frequency_stride": 8, "time_stride": 8, "max_length": 32, "num_mel_bins": 16}
    model = configured("AST", "ASTForAudioClassification", num_labels=CLASSES, **sizes, **SMALL)
    return Named(model, ("input_values",), "logits"), (normal(SAMPLES, 32, 16), labels()), functional.cross_entropy


made("data2vec_audio", "data2vec for sound (Baevski et al. 2022)")(waves, "Data2VecAudio", conv_pos_kernel_size=5)
made("hubert", "HuBERT (Hsu et al. 2021)")(waves, "Hubert")
made("sew", "SEW (Wu et al. 2022): sequences squeezed between convolution and attention")(
    waves, "SEW", squeeze_factor=2
)
made("unispeech", "UniSpeech (Wang et al. 2021)")(waves, "UniSpeech")
made("wav2vec2_conformer", "wav2vec 2.0 with Conformer blocks (Wang et al. 2020)")(
    waves, "Wav2Vec2Conformer", conv_depthwise_kernel_size=5
)
made("wavlm", "WavLM (Chen et al. 2022): gated relative positions")(
    waves, "WavLM", num_buckets=16, max_bucket_distance=32
)


@network("PatchTST (Nie et al. 2023): patches of several time series")
def patchtst() -> Example:
    sizes = {"num_input_channels": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 32}
    more = {"num_attention_heads": 4, "ffn_dim": 64, "num_hidden_layers": 2, "num_targets": CLASSES}
    model = configured("PatchTST", "PatchTSTForClassification", **sizes, **more)
    named = Named(model, ("past_values",), "prediction_logits")
    return named, (normal(SAMPLES, 32, 3), labels()), functional.cross_entropy


@network("PatchTSMixer (Ekambaram et al. 2023): time series")
def patchtsmixer() -> Example:
    sizes = {"context_length": 32, "patch_length": 8, "patch_stride": 8, "num_input_channels": 3, "d_model": 16}
    model = configured("PatchTSMixer", "PatchTSMixerForTimeSeriesClassification", num_targets=CLASSES, **sizes)
    named = Named(model, ("past_values",), "prediction_outputs", return_loss=False)
    return named, (normal(SAMPLES, 32, 3), labels()), functional.cross_entropy


@network("Perceiver (Jaegle et al. 2021): a few latents read the whole text")
def perceiver() -> Example:
    sizes = {"num_latents": 8, "d_latents": 32, "d_model": 32, "num_blocks": 1, "num_self_attends_per_block": 2}
    heads = {"num_self_attention_heads": 4, "num_cross_attention_heads": 4, "max_position_embeddings": 16}
    settings: dict[str, Any] = {**sizes, **heads, "vocab_size": 200, "num_labels": CLASSES}
    named = Named(configured("Perceiver", "PerceiverForSequenceClassification", **settings), ("inputs",), "logits")
    return named, (tokens(SAMPLES, 16), labels()), functional.cross_entropy


@network("Decision Transformer (Chen et al. 2021): states, actions and returns as one sequence")
def decision_transformer() -> Example:
    sizes = {"state_dim": 6, "act_dim": 3, "hidden_size": 32, "n_layer": 2, "n_head": 4, "max_ep_len": 32}
    names = ("states", "actions", "rewards", "returns_to_go", "timesteps", "attention_mask")
    model = configured("DecisionTransformer", "DecisionTransformerModel", **sizes)
    steps = torch.arange(8).repeat(SAMPLES, 1)
    numbers = [normal(SAMPLES, 8, width) for width in (6, 3, 1, 1)]
    inputs = (*numbers, steps, torch.ones(SAMPLES, 8))
    return Named(model, names, "action_preds"), (inputs, normal(SAMPLES, 8, 3, seed=1)), functional.mse_loss
