"""Transformers as people write them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network
from tests.zoo.entries import network
from tests.zoo.frozen import token_loss


def tokens(vocab: int = 11, rows: int = 4, length: int = 6) -> tuple[Tensor, Tensor]:
    ids = torch.randint(vocab, (rows, length + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class CausalSelfAttention(nn.Module):
    """minGPT's."""

    def __init__(self, width: int = 8, heads: int = 2, block: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head = heads
        self.attn_drop = nn.Dropout(dropout)
        self.register_buffer("bias", torch.tril(torch.ones(block, block)).view(1, 1, block, block))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (each.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for each in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_drop(F.softmax(att, dim=-1))
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))


class MinGPT(nn.Module):
    def __init__(self, dropout: float = 0.0, vocab: int = 11, width: int = 8) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(8, width)
        self.ln1 = nn.LayerNorm(width)
        self.ln2 = nn.LayerNorm(width)
        self.ln_f = nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, dropout=dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device).unsqueeze(0)
        x = self.wte(idx) + self.wpe(pos)
        x = x + self.attn(self.ln1(x))
        x = x + self.mlp(self.ln2(x))
        return self.head(self.ln_f(x))


@network("minGPT: a causal mask in a buffer, positions by arange")
def min_gpt() -> Network:
    return MinGPT(), tokens(), token_loss


@network("minGPT with dropout of attention weights", draws=True)
def min_gpt_dropout() -> Network:
    return MinGPT(0.2), tokens(), token_loss


class Fused(nn.Module):
    """scaled_dot_product_attention with is_causal and dropout_p."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 11)
        self.dropout = dropout

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


@network("scaled_dot_product_attention, causal")
def fused_causal() -> Network:
    return Fused(0.0), tokens(), token_loss


@network("scaled_dot_product_attention with dropout", draws=True)
def fused_dropout() -> Network:
    return Fused(0.3), tokens(), token_loss


class RoPE(nn.Module):
    """Rotary embeddings by rotate_half, several queries a key."""

    def __init__(self) -> None:
        super().__init__()
        inv = 1.0 / (100 ** (torch.arange(0, 4, 2).float() / 4))
        self.register_buffer("inv_freq", inv)
        self.emb = nn.Embedding(11, 8)
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 4)
        self.v = nn.Linear(8, 4)
        self.o = nn.Linear(8, 11)

    @staticmethod
    def rotate_half(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((-b, a), dim=-1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        t = torch.arange(ids.shape[1], device=ids.device).type_as(self.inv_freq)
        freqs = torch.einsum("i,j->ij", t, self.inv_freq)
        cos, sin = (f(torch.cat((freqs, freqs), dim=-1))[None, None] for f in (torch.cos, torch.sin))
        q = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        k = self.k(x).unsqueeze(1)
        v = self.v(x).unsqueeze(1)
        q = q * cos + self.rotate_half(q) * sin
        k = k * cos + self.rotate_half(k) * sin
        k = k.repeat_interleave(2, dim=1)
        v = v.repeat_interleave(2, dim=1)
        mask = torch.full((ids.shape[1],) * 2, float("-inf"), dtype=x.dtype).triu(1)
        y = ((q @ k.transpose(-1, -2)) / 2 + mask).softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


@network("rotary positions, grouped queries, a mask made in forward")
def rope() -> Network:
    return RoPE(), tokens(), token_loss


class Alibi(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        slopes = torch.tensor([0.5, 0.25]).view(2, 1, 1)
        distance = torch.arange(8)[None, :] - torch.arange(8)[:, None]
        self.register_buffer("alibi", slopes * distance.clamp(max=0), persistent=False)
        self.register_buffer("causal", torch.ones(8, 8, dtype=torch.bool).triu(1), persistent=False)
        self.emb = nn.Embedding(11, 8)
        self.qkv = nn.Linear(8, 24, bias=False)
        self.o = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        T = ids.size(1)
        q, k, v = self.qkv(self.emb(ids)).view(ids.size(0), T, 3, 2, 4).unbind(2)
        s = torch.einsum("bqhd,bkhd->bhqk", q, k) / 2 + self.alibi[:, :T, :T]
        s = s.masked_fill(self.causal[:T, :T], torch.finfo(s.dtype).min)
        return self.o(torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v).reshape(ids.size(0), T, 8))


@network("ALiBi in a buffer, einsum, finfo.min as mask")
def alibi() -> Network:
    return Alibi(), tokens(), token_loss


class Encoder(nn.Module):
    """nn.TransformerEncoder with a padding mask and mean pooling."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.emb = nn.Embedding(11, 8)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        pad = ids == 0
        x = self.enc(self.emb(ids), src_key_padding_mask=pad)
        keep = (~pad).unsqueeze(-1).to(x.dtype)
        return self.fc((x * keep).sum(1) / keep.sum(1))


@network("nn.TransformerEncoder with a padding mask")
def transformer_encoder() -> Network:
    ids = torch.randint(1, 11, (4, 6))
    ids[1, 4:] = 0
    return Encoder(), (ids, torch.randint(3, (4,))), F.cross_entropy


class Multihead(nn.Module):
    """nn.MultiheadAttention, samples second, weights returned and used in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(6, 2, dropout=0.0)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.transpose(0, 1)
        y, w = self.attn(x, x, x)
        return self.fc(y.mean(0)), w


@network("nn.MultiheadAttention with samples second; its weights are in the loss")
def multihead_weights() -> Network:
    def loss(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return F.cross_entropy(out[0], y) + 0.1 * out[1].pow(2).mean()

    return Multihead(), (torch.randn(4, 5, 6), torch.randint(3, (4,))), loss


class Linformer(nn.Module):
    """Linear attention: cumulative sums over time, elu plus one."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.q, self.k, self.v, self.o = (
            nn.Embedding(11, 6),
            *(nn.Linear(6, 6) for _ in range(3)),
            nn.Linear(6, 11),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        q = F.elu(self.q(x)) + 1
        k = F.elu(self.k(x)) + 1
        v = self.v(x)
        kv = torch.einsum("btd,bte->btde", k, v).cumsum(dim=1)
        z = 1 / (torch.einsum("btd,btd->bt", q, k.cumsum(1)) + 1e-6)
        return self.o(torch.einsum("btd,btde,bt->bte", q, kv, z))


@network("causal linear attention by cumsum")
def linear_attention() -> Network:
    return Linformer(), tokens(), token_loss


class FNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.ff = nn.Linear(8, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        x = self.norm(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
        return self.out((x + F.gelu(self.ff(x))).mean(1))


@network("FNet: a Fourier transform in place of attention")
def fourier_mixing() -> Network:
    return FNet(), (torch.randint(11, (4, 6)), torch.randint(3, (4,))), F.cross_entropy


class ViT(nn.Module):
    """Patches by rearranging, a class token, learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(48, 8)
        self.cls = nn.Parameter(torch.zeros(1, 1, 8))
        self.pos = nn.Parameter(torch.randn(1, 5, 8) * 0.02)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 3)

    def forward(self, img: Tensor) -> Tensor:
        b, c, h, w = img.shape
        x = img.reshape(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(b, -1, 16 * c)
        x = torch.cat((self.cls.repeat(b, 1, 1), self.patch(x)), dim=1) + self.pos
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + torch.softmax(q @ k.transpose(1, 2) / 8**0.5, -1) @ v
        return self.head(x[:, 0])


@network("a vision transformer: patches by reshape and permute, a class token repeated over the batch")
def vit() -> Network:
    return ViT(), (torch.randn(4, 3, 8, 8), torch.randint(3, (4,))), F.cross_entropy
