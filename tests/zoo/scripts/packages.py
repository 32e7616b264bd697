"""Networks of packages as their users call them: their own loss where they have one, batches that are dicts.

Each function is the first half of a script: it gives the module, a batch, and where the module does not give its loss
itself, a loss function.  Its source is all that the script has: it imports what it needs.
"""

from __future__ import annotations

from typing import Any


def bert() -> Any:
    """BERT for classes of sentences, a batch as its tokeniser makes it."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = BertConfig(vocab_size=200, num_labels=5, **sizes)
    batch = {"input_ids": torch.randint(200, (4, 16)), "attention_mask": torch.ones(4, 16, dtype=torch.long)}
    return BertForSequenceClassification(config), {**batch, "labels": torch.randint(5, (4,))}


def roberta_tokens() -> Any:
    """RoBERTa for classes of words."""
    import torch
    from transformers import RobertaConfig, RobertaForTokenClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = RobertaConfig(vocab_size=200, max_position_embeddings=40, num_labels=5, **sizes)
    return RobertaForTokenClassification(config), {
        "input_ids": torch.randint(3, 200, (4, 16)),
        "labels": torch.randint(5, (4, 16)),
    }


def distilbert_answers() -> Any:
    """DistilBERT for questions: two losses, of the first and of the last word of an answer."""
    import torch
    from transformers import DistilBertConfig, DistilBertForQuestionAnswering

    config = DistilBertConfig(vocab_size=200, max_position_embeddings=64, n_layers=2, n_heads=4, dim=64, hidden_dim=128)
    words = torch.randint(200, (4, 16))
    first = torch.randint(8, (4,))
    last = torch.randint(8, 16, (4,))
    return DistilBertForQuestionAnswering(config), {
        "input_ids": words,
        "start_positions": first,
        "end_positions": last,
    }


def gpt2() -> Any:
    """GPT-2, which shifts its labels itself."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    words = torch.randint(200, (4, 16))
    return GPT2LMHeadModel(GPT2Config(vocab_size=200, n_positions=64, n_embd=64, n_layer=2, n_head=4)), {
        "input_ids": words,
        "labels": words,
    }


def llama() -> Any:
    """Llama, padded: labels of -100 count for nothing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    words = torch.randint(3, 200, (4, 16))
    mask = torch.ones(4, 16, dtype=torch.long)
    mask[1, 10:] = 0
    return LlamaForCausalLM(config), {
        "input_ids": words,
        "attention_mask": mask,
        "labels": words.masked_fill(mask == 0, -100),
    }


def mixtral() -> Any:
    """Mixtral: experts."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        experts_implementation="batched_mm",
    )
    words = torch.randint(3, 200, (4, 16))
    return MixtralForCausalLM(config), {"input_ids": words, "labels": words}


def t5() -> Any:
    """T5: the decoder's words are made of the labels."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=200, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config), {
        "input_ids": torch.randint(2, 200, (4, 16)),
        "labels": torch.randint(2, 200, (4, 10)),
    }


def bart() -> Any:
    """BART: a summary."""
    import torch
    from transformers import BartConfig, BartForConditionalGeneration

    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 128))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = BartConfig(vocab_size=200, d_model=64, max_position_embeddings=64, **sides, **heads)
    return BartForConditionalGeneration(config), {
        "input_ids": torch.randint(3, 200, (4, 16)),
        "labels": torch.randint(3, 200, (4, 10)),
    }


def whisper() -> Any:
    """Whisper: spectrograms and words."""
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 128))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1}
    sizes = {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32, "eos_token_id": 2}
    config = WhisperConfig(vocab_size=200, d_model=64, decoder_start_token_id=1, **sides, **heads, **sizes)
    return WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(4, 16, 40),
        "labels": torch.randint(3, 200, (4, 10)),
    }


def hubert() -> Any:
    """HuBERT for classes of sounds."""
    import torch
    from transformers import HubertConfig, HubertForSequenceClassification

    config = HubertConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        conv_dim=(32, 32),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        num_labels=5,
        mask_time_prob=0.0,
        layerdrop=0.0,
    )
    sounds = torch.randn(4, 800)
    return HubertForSequenceClassification(config), {"input_values": sounds, "labels": torch.randint(5, (4,))}


def vit() -> Any:
    """ViT as its image processor feeds it."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = ViTConfig(image_size=32, patch_size=8, num_labels=5, **sizes)
    pictures = torch.randn(4, 3, 32, 32)
    return ViTForImageClassification(config), {"pixel_values": pictures, "labels": torch.randint(5, (4,))}


def segformer() -> Any:
    """SegFormer: a class for every place, some places without."""
    import torch
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], decoder_hidden_size=32, num_labels=5)
    places = torch.randint(5, (4, 64, 64))
    return SegformerForSemanticSegmentation(config), {"pixel_values": torch.randn(4, 3, 64, 64), "labels": places}


def clip() -> Any:
    """CLIP: each picture against all captions of the batch, asked for by a flag."""
    import torch
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    words = {**sizes, "vocab_size": 200, "max_position_embeddings": 32, "eos_token_id": 2, "bos_token_id": 1}
    config = CLIPConfig(
        text_config=words, vision_config={**sizes, "image_size": 32, "patch_size": 8}, projection_dim=32
    )
    captions = torch.randint(3, 200, (4, 16))
    pictures = torch.randn(4, 3, 32, 32)
    captions[:, -1] = 2
    return CLIPModel(config), {"input_ids": captions, "pixel_values": pictures, "return_loss": True}


def patchtst() -> Any:
    """PatchTST: time series that are to be continued."""
    import torch
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    config = PatchTSTConfig(
        num_input_channels=3,
        context_length=32,
        patch_length=8,
        patch_stride=8,
        d_model=32,
        num_attention_heads=4,
        ffn_dim=64,
        num_hidden_layers=2,
        prediction_length=8,
        loss="mse",
    )
    return PatchTSTForPrediction(config), {"past_values": torch.randn(4, 32, 3), "future_values": torch.randn(4, 8, 3)}


def torchvision_resnet() -> Any:
    """ResNet-18 of torchvision with a batch of a DataLoader, which is a list."""
    import torch
    from torch import nn
    from torchvision.models import resnet18

    batch = [torch.randn(8, 3, 64, 64), torch.randint(10, (8,))]
    return resnet18(num_classes=10), batch, nn.CrossEntropyLoss()


def torchvision_segmentation() -> Any:
    """LR-ASPP of torchvision, whose output is a dict."""
    import torch
    from torch.nn import functional
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5)
    batch = torch.randn(4, 3, 64, 64), torch.randint(5, (4, 64, 64))
    return model, batch, lambda output, places: functional.cross_entropy(output["out"], places)


def torchvision_googlenet() -> Any:
    """GoogLeNet of torchvision, whose output is a named tuple of three."""
    import torch
    from torch.nn import functional
    from torchvision.models import googlenet

    def loss(output: Any, labels: Any) -> Any:
        sides = (output.aux_logits1, output.aux_logits2)
        return functional.cross_entropy(output.logits, labels) + 0.3 * sum(
            functional.cross_entropy(side, labels) for side in sides
        )

    batch = torch.randn(4, 3, 64, 64), torch.randint(10, (4,))
    return googlenet(num_classes=10, aux_logits=True, init_weights=False), batch, loss


def timm_efficientnet() -> Any:
    """EfficientNet-B0 of timm."""
    import timm
    import torch
    from torch.nn import functional

    batch = torch.randn(4, 3, 64, 64), torch.randint(10, (4,))
    return timm.create_model("efficientnet_b0", num_classes=10), batch, functional.cross_entropy


def timm_vit() -> Any:
    """ViT of timm with a smoothed loss of timm's."""
    import timm
    import torch
    from timm.loss import LabelSmoothingCrossEntropy

    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, num_classes=10)
    return model, (torch.randn(4, 3, 64, 64), torch.randint(10, (4,))), LabelSmoothingCrossEntropy(0.1)


def torch_transformer() -> Any:
    """The encoder of torch itself with embedding and head, as tutorials have it."""
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.Sequential(nn.Embedding(50, 32), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(512, 3))
    return model, (torch.randint(50, (4, 16)), torch.randint(3, (4,))), nn.CrossEntropyLoss()
