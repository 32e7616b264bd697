"""Sequences: encoders and decoders with masks, experts with capacities, memories, tags, relative places."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.zoo.autograd import Network
from tests.zoo.entries import WHOLE_BATCH, network

PAD = 0


def padded(rows: int = 4, length: int = 6, vocab: int = 9) -> Tensor:
    ids = torch.randint(1, vocab, (rows, length))
    for row, cut in enumerate((length, length - 2, length - 1, length - 3)[:rows]):
        ids[row, cut:] = PAD
    return ids


class Translator(nn.Module):
    """nn.Transformer as in the tutorials: causal mask, masks of padding, target embedding tied to the output."""

    def __init__(self, vocab: int = 9, width: int = 8) -> None:
        super().__init__()
        self.src, self.tgt = (nn.Embedding(vocab, width, padding_idx=PAD) for _ in range(2))
        self.register_buffer("pe", torch.randn(1, 10, width) * 0.1)
        self.transformer = nn.Transformer(width, 2, 1, 2, 16, dropout=0.0, batch_first=True)
        self.generator = nn.Linear(width, vocab)
        self.generator.weight = self.tgt.weight
        self.scale = width**0.5

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.size(1), dtype=self.pe.dtype)
        a = self.src(src) * self.scale + self.pe[:, : src.size(1)]
        b = self.tgt(tgt) * self.scale + self.pe[:, : tgt.size(1)]
        hidden = self.transformer(
            a,
            b,
            tgt_mask=causal,
            src_key_padding_mask=src == PAD,
            memory_key_padding_mask=src == PAD,
            tgt_is_causal=True,
        )
        return self.generator(hidden)


@network("nn.Transformer: causal mask, padding masks, tied output, smoothed labels without padding")
def translator() -> Network:
    tgt = padded(length=5)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
    return Translator(), ((padded(), tgt), tgt.roll(-1, 1)), lambda out, y: criterion(out.transpose(1, 2), y)


class Tagger(nn.Module):
    """A packed bidirectional LSTM, as in every tutorial of text classification."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 5, padding_idx=PAD)
        self.lstm = nn.LSTM(5, 4, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        lengths = (ids != PAD).sum(1)
        packed = pack_padded_sequence(self.emb(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, (h, _) = self.lstm(packed)
        out, _ = pad_packed_sequence(out, batch_first=True, total_length=ids.size(1))
        return self.fc(out.sum(1) + torch.cat([h[0], h[1]], 1))


@network("a packed bidirectional LSTM, lengths by counting what is no padding")
def packed_tagger() -> Network:
    return Tagger(), (padded(), torch.randint(3, (4,))), F.cross_entropy


class Reader(nn.Module):
    """A packed encoder, time first, whose last states begin a packed decoder; attention over what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 5, padding_idx=PAD)
        self.enc = nn.GRU(5, 4, num_layers=2)
        self.dec = nn.GRU(5, 4, num_layers=2)
        self.out = nn.Linear(8, 9)

    def forward(self, src: Tensor, src_lengths: Tensor, tgt: Tensor, tgt_lengths: Tensor) -> Tensor:
        x = self.emb(src).transpose(0, 1)
        y = self.emb(tgt).transpose(0, 1)
        packed, h = self.enc(pack_padded_sequence(x, src_lengths.cpu(), enforce_sorted=False))
        memory, _ = pad_packed_sequence(packed, padding_value=-1.0, total_length=src.size(1))
        packed, _ = self.dec(nn.utils.rnn.pack_padded_sequence(y, tgt_lengths.cpu(), enforce_sorted=False), h)
        read, _ = pad_packed_sequence(packed, batch_first=True, total_length=tgt.size(1))
        scores = read @ memory.permute(1, 2, 0)
        scores = scores.masked_fill((src == PAD).unsqueeze(1), -1e9)
        return self.out(torch.cat([read, scores.softmax(-1) @ memory.transpose(0, 1)], -1))


@network("packed GRUs of two levels, the second one begun by the first one's states; time first, padded by -1")
def packed_translator() -> Network:
    src = padded()
    tgt = padded(length=5)
    inputs = src, (src != PAD).sum(1), tgt, (tgt != PAD).sum(1)
    return Reader(), (inputs, tgt.roll(-1, 1)), lambda out, y: F.cross_entropy(out.transpose(1, 2), y, ignore_index=PAD)


class CRF(nn.Module):
    """A conditional random field: the forward algorithm with masks, the gold path by gather; its own loss."""

    def __init__(self, tags: int = 4) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 5)
        self.rnn = nn.GRU(5, 4, batch_first=True)
        self.fc = nn.Linear(4, tags)
        self.start = nn.Parameter(torch.randn(tags))
        self.end = nn.Parameter(torch.randn(tags))
        self.transitions = nn.Parameter(torch.randn(tags, tags))

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        emissions = self.fc(self.rnn(self.emb(ids))[0])
        mask = ids != PAD
        gold = self.start[tags[:, 0]] + emissions[:, 0].gather(1, tags[:, :1]).squeeze(1)
        alpha = self.start + emissions[:, 0]
        for t in range(1, ids.size(1)):
            here = (
                emissions[:, t].gather(1, tags[:, t : t + 1]).squeeze(1) + self.transitions[tags[:, t - 1], tags[:, t]]
            )
            gold = gold + here * mask[:, t]
            new = torch.logsumexp(alpha.unsqueeze(2) + self.transitions + emissions[:, t].unsqueeze(1), dim=1)
            alpha = torch.where(mask[:, t].unsqueeze(1), new, alpha)
        last = mask.long().sum(1) - 1
        gold = gold + self.end[tags.gather(1, last.unsqueeze(1)).squeeze(1)]
        return (torch.logsumexp(alpha + self.end, 1) - gold).mean()


@network("a conditional random field: a masked recursion of logsumexp, the gold path by pairs of indices; its own loss")
def random_field() -> Network:
    tags = torch.randint(4, (4, 6))
    return CRF(), ((padded(), tags), tags), lambda out, _: out


class Switch(nn.Module):
    """Top-1 routing with a capacity, places by cumsum, dispatch and combine by einsum (GShard, Switch)."""

    def __init__(self, by_sample: bool, balanced: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 6)
        self.gate = nn.Linear(6, 3)
        self.by_sample = by_sample
        self.balanced = balanced
        self.w1 = nn.Parameter(torch.randn(3, 6, 8) * 0.3)
        self.w2 = nn.Parameter(torch.randn(3, 8, 6) * 0.3)
        self.head = nn.Linear(6, 5)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.emb(ids)
        tokens = x if self.by_sample else x.reshape(1, -1, 6)
        capacity = 3
        p = self.gate(tokens).softmax(-1)
        weight, chosen = p.topk(1, dim=-1)
        hot = F.one_hot(chosen.squeeze(-1), 3)
        place = (hot.cumsum(1) - 1) * hot
        hot = hot * (place < capacity)
        dispatch = hot.unsqueeze(-1) * F.one_hot((place * hot).sum(-1), capacity).unsqueeze(2)
        dispatch = dispatch.to(x.dtype)
        inputs = torch.einsum("gsec,gsm->gecm", dispatch, tokens)
        h = torch.einsum("gech,ehm->gecm", F.relu(torch.einsum("gecm,emh->gech", inputs, self.w1)), self.w2)
        y = torch.einsum("gsec,gecm->gsm", dispatch * weight.unsqueeze(-1), h)
        share = hot.to(x.dtype).mean((0, 1))
        mean = p.mean((0, 1))
        balance = 3 * (share * mean).sum() if self.balanced else p.pow(2).mean()
        return self.head(x + y.view_as(x)), balance


def _tokens_and_balance(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return F.cross_entropy(out[0].flatten(0, 1), y.flatten()) + 0.01 * out[1]


def _words() -> tuple[Tensor, Tensor]:
    return torch.randint(9, (4, 6)), torch.randint(5, (4, 6))


@network("experts with a capacity in each sample: topk, cumsum, one-hot dispatch by einsum")
def experts_by_sample() -> Network:
    return Switch(True), _words(), _tokens_and_balance


@network("experts with a capacity over the batch: who is dropped depends on earlier samples", refused=WHOLE_BATCH)
def experts_over_the_batch() -> Network:
    return Switch(False), _words(), _tokens_and_balance


@network("Switch's balance: the product of two means over the batch", refused=WHOLE_BATCH)
def experts_balanced() -> Network:
    return Switch(True, True), _words(), _tokens_and_balance


class RelativeAttention(nn.Module):
    """Transformer-XL: relative scores shifted by padding and viewing."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 8)
        self.qkv = nn.Linear(8, 24, bias=False)
        self.r = nn.Parameter(torch.randn(6, 2, 4))
        self.u = nn.Parameter(torch.randn(2, 4))
        self.v = nn.Parameter(torch.randn(2, 4))
        self.out = nn.Linear(8, 9)

    def forward(self, ids: Tensor) -> Tensor:
        b, t = ids.shape
        q, k, v = self.qkv(self.emb(ids)).view(b, t, 3, 2, 4).unbind(2)
        content = torch.einsum("bihd,bjhd->bhij", q + self.u, k)
        places = torch.einsum("bihd,jhd->bhij", q + self.v, self.r[:t])
        places = F.pad(places, (1, 0)).view(b, 2, t + 1, t)[:, :, 1:].view_as(places)
        scores = (content + places) / 2
        mask = torch.ones(t, t, dtype=torch.bool, device=ids.device).triu(1)
        weights = scores.masked_fill(mask[None, None], -1e30).softmax(-1)
        return self.out(torch.einsum("bhij,bjhd->bihd", weights, v).reshape(b, t, 8))


@network("Transformer-XL: relative scores shifted by padding and viewing")
def relative_shift() -> Network:
    ids = torch.randint(9, (4, 6))
    return RelativeAttention(), (ids, ids.roll(-1, 1)), lambda out, y: F.cross_entropy(out.permute(0, 2, 1), y)


class Perceiver(nn.Module):
    """Latents of the module, expanded over the batch, read padded inputs by nn.MultiheadAttention; one block twice."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 8, padding_idx=PAD)
        self.latents = nn.Parameter(torch.randn(3, 8) * 0.2)
        self.cross = nn.MultiheadAttention(8, 2, batch_first=True, kdim=8, vdim=8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, activation="gelu")
        self.fc = nn.Linear(24, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        pad = ids.eq(PAD)
        z = self.latents.unsqueeze(0).expand(ids.size(0), -1, -1)
        for _ in range(2):
            z = z + self.cross(z, x, x, key_padding_mask=pad, need_weights=False)[0]
            z = self.block(z)
        return self.fc(z.flatten(1))


@network("Perceiver: latents expanded over the batch, cross attention with padding, the same block twice")
def perceiver() -> Network:
    return Perceiver(), (padded(), torch.randint(3, (4,))), F.cross_entropy


class Prompted(nn.Module):
    """Prompt tuning: a frozen network, learned prompts in front, of it only the last layer's norm is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)
        self.prompt = nn.Parameter(torch.randn(2, 8) * 0.1)
        self.head = nn.Linear(8, 3)
        for name, p in self.named_parameters():
            p.requires_grad = name in ("prompt", "body.norm.weight") or name.startswith("head")

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat([self.prompt.expand(len(ids), -1, -1), self.emb(ids)], 1)
        return self.head(self.body(x)[:, :2].mean(1))


@network("prompt tuning: nearly all is frozen, gradients go through it to a prompt")
def prompt_tuning() -> Network:
    return Prompted(), (torch.randint(9, (4, 5)), torch.randint(3, (4,))), F.cross_entropy


class Captioner(nn.Module):
    """An image's features start a GRU with attention, teacher forcing for even steps, its own words for odd ones."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 6, 3, 2, 1))
        self.init_h = nn.Linear(6, 5)
        self.emb = nn.Embedding(9, 4)
        self.cell = nn.GRUCell(10, 5)
        self.q = nn.Linear(5, 4)
        self.k = nn.Linear(6, 4)
        self.score = nn.Linear(4, 1)
        self.out = nn.Linear(5, 9)

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        memory = self.cnn(image).flatten(2).permute(0, 2, 1)
        h = torch.tanh(self.init_h(memory.mean(1)))
        word = words[:, 0]
        logits = []
        for t in range(words.size(1)):
            a = self.score(torch.tanh(self.q(h)[:, None] + self.k(memory))).softmax(1)
            h = self.cell(torch.cat([self.emb(word), (a * memory).sum(1)], -1), h)
            logits.append(self.out(h))
            if t + 1 < words.size(1):
                word = words[:, t + 1] if t % 2 else logits[-1].argmax(-1)
        return torch.stack(logits, 2)


@network("captions: a GRU with attention that is fed its own words at odd steps")
def captioner() -> Network:
    words = torch.randint(9, (4, 4))
    return Captioner(), ((torch.randn(4, 3, 8, 8), words), words.roll(-1, 1)), F.cross_entropy


class Pointer(nn.Module):
    """A pointer network: places already chosen are masked by scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.LSTM(2, 5, batch_first=True)
        self.cell = nn.LSTMCell(2, 5)
        self.w1 = nn.Linear(5, 4)
        self.w2 = nn.Linear(5, 4)
        self.v = nn.Linear(4, 1, bias=False)
        self.first = nn.Parameter(torch.rand(2))

    def forward(self, points: Tensor) -> Tensor:
        memory, (h, c) = self.enc(points)
        h = h.squeeze(0)
        c = c.squeeze(0)
        x = self.first.repeat(points.size(0), 1)
        taken = torch.zeros(points.shape[:2], dtype=torch.bool)
        rows = torch.arange(points.size(0))
        steps = []
        for _ in range(points.size(1)):
            h, c = self.cell(x, (h, c))
            scores = self.v(torch.tanh(self.w1(memory) + self.w2(h).unsqueeze(1))).squeeze(-1)
            logp = scores.masked_fill(taken, -1e9).log_softmax(-1)
            steps.append(logp)
            chosen = logp.argmax(-1)
            taken = taken.scatter(1, chosen.unsqueeze(1), True)
            x = points[rows, chosen]
        return torch.stack(steps, 1)


@network("a pointer network: chosen places masked by scatter, inputs by rows and places")
def pointer() -> Network:
    points = torch.rand(4, 4, 2)
    order = torch.rand(4, 4).argsort(1)
    return Pointer(), (points, order), lambda out, y: F.nll_loss(out.flatten(0, 1).clamp(min=-50), y.flatten())
