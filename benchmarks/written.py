"""Models as people write them by hand, in tutorials, repositories and papers' code; each tiny.

They keep the idioms of what they are after (where heads are viewed, what is a buffer, which `einsum`): these are what
is tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --- language models -------------------------------------------------------------------------------------------------


class NanoGPT(nn.Module):
    """karpathy/nanoGPT: fused qkv cut by `split`, a tied head, a bias-free layer norm, a loss in forward."""

    def __init__(self, vocab: int = 65, block: int = 16, width: int = 48, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.wte, self.wpe, self.drop = nn.Embedding(vocab, width), nn.Embedding(block, width), nn.Dropout(0.1)
        self.h = nn.ModuleList(
            nn.ModuleDict({
                "ln_1": nn.LayerNorm(width, bias=False), "c_attn": nn.Linear(width, 3 * width, bias=False),
                "c_proj": nn.Linear(width, width, bias=False), "ln_2": nn.LayerNorm(width, bias=False),
                "c_fc": nn.Linear(width, 4 * width, bias=False), "out": nn.Linear(4 * width, width, bias=False),
            })
            for _ in range(layers)
        )  # fmt: skip
        self.ln_f, self.lm_head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocab, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        b, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            q, k, v = block["c_attn"](block["ln_1"](x)).split(self.width, dim=2)
            q, k, v = (y.view(b, t, self.heads, self.width // self.heads).transpose(1, 2) for y in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0, is_causal=True)
            x = x + F.dropout(
                block["c_proj"](y.transpose(1, 2).contiguous().view(b, t, self.width)), 0.1, self.training
            )
            x = x + F.dropout(block["out"](F.gelu(block["c_fc"](block["ln_2"](x)))), 0.1, self.training)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class MinGPT(nn.Module):
    """karpathy/minGPT: three products, a causal buffer, `masked_fill` with -inf, NewGELU."""

    def __init__(self, vocab: int = 65, block: int = 16, width: int = 48, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Parameter(torch.zeros(1, block, width))
        self.register_buffer("bias", torch.tril(torch.ones(block, block)).view(1, 1, block, block))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"ln1": nn.LayerNorm(width), "key": nn.Linear(width, width), "query": nn.Linear(width, width),
                           "value": nn.Linear(width, width), "proj": nn.Linear(width, width),
                           "ln2": nn.LayerNorm(width), "up": nn.Linear(width, 4 * width),
                           "down": nn.Linear(4 * width, width)})
            for _ in range(layers)
        )  # fmt: skip
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        t = idx.size(1)
        x = self.tok(idx) + self.pos[:, :t, :]
        for m in self.blocks:
            h = m["ln1"](x)
            b, t, c = h.size()
            k, q, v = (
                m[n](h).view(b, t, self.heads, c // self.heads).transpose(1, 2) for n in ("key", "query", "value")
            )
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = F.softmax(att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf")), dim=-1)
            y = (F.dropout(att, 0.1, self.training) @ v).transpose(1, 2).contiguous().view(b, t, c)
            x = x + m["proj"](y)
            h = m["up"](m["ln2"](x))
            h = 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))
            x = x + m["down"](h)
        return self.head(self.ln_f(x))


class Llama(nn.Module):
    """meta-llama/llama's model.py: complex rotary embeddings, `repeat_kv`, RMSNorm in float."""

    def __init__(self, vocab: int = 65, width: int = 48, heads: int = 4, kv_heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.tok = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "wq": nn.Linear(width, width, bias=False), "wk": nn.Linear(width, kv_heads * self.size, bias=False),
                "wv": nn.Linear(width, kv_heads * self.size, bias=False), "wo": nn.Linear(width, width, bias=False),
                "w1": nn.Linear(width, 96, bias=False), "w2": nn.Linear(96, width, bias=False),
                "w3": nn.Linear(width, 96, bias=False), "n1": nn.RMSNorm(width), "n2": nn.RMSNorm(width),
            })
            for _ in range(layers)
        )  # fmt: skip
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)
        freqs = 1.0 / (10000 ** (torch.arange(0, self.size, 2)[: self.size // 2].float() / self.size))
        angles = torch.outer(torch.arange(32), freqs)
        self.freqs_cis = torch.polar(torch.ones_like(angles), angles)

    def _rotated(self, x: Tensor, freqs: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs.view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)

    def forward(self, tokens: Tensor) -> Tensor:
        b, t = tokens.shape
        h, freqs = self.tok(tokens), self.freqs_cis[:t]
        mask = torch.triu(torch.full((t, t), float("-inf"), device=tokens.device), diagonal=1).type_as(h)
        for m in self.layers:
            x = m["n1"](h)
            q = self._rotated(m["wq"](x).view(b, t, self.heads, self.size), freqs)
            k = self._rotated(m["wk"](x).view(b, t, self.kv_heads, self.size), freqs)
            v, n = m["wv"](x).view(b, t, self.kv_heads, self.size), self.heads // self.kv_heads
            k, v = (
                y[:, :, :, None, :].expand(b, t, self.kv_heads, n, self.size).reshape(b, t, self.heads, self.size)
                for y in (k, v)
            )
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.size) + mask
            out = torch.matmul(F.softmax(scores.float(), dim=-1).type_as(q), v)
            h = h + m["wo"](out.transpose(1, 2).contiguous().view(b, t, -1))
            x = m["n2"](h)
            h = h + m["w2"](F.silu(m["w1"](x)) * m["w3"](x))
        return self.output(self.norm(h)).float()


class Rwkv(nn.Module):
    """RWKV-4: token shift, and the `wkv` recurrence written as a loop over the steps."""

    def __init__(self, vocab: int = 65, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.emb, self.layers = nn.Embedding(vocab, width), nn.ModuleList()
        for _ in range(layers):
            m = nn.ModuleDict({n: nn.Linear(width, width, bias=False) for n in ("r", "k", "v", "o", "fr")})
            m["fk"], m["fv"] = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
            m["ln1"], m["ln2"] = nn.LayerNorm(width), nn.LayerNorm(width)
            m["w"] = nn.ParameterDict({n: nn.Parameter(torch.rand(width)) for n in ("decay", "first", "mix", "fmix")})
            self.layers.append(m)
        self.head, self.shift = nn.Linear(width, vocab, bias=False), nn.ZeroPad2d((0, 0, 1, -1))

    def forward(self, idx: Tensor) -> Tensor:
        x = self.emb(idx)
        for m in self.layers:
            h = m["ln1"](x)
            mixed = h * m["w"]["mix"] + self.shift(h) * (1 - m["w"]["mix"])
            k, v, r = m["k"](mixed), m["v"](mixed), torch.sigmoid(m["r"](mixed))
            num, den, made = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), []
            for t in range(idx.shape[1]):
                first = torch.exp(m["w"]["first"] + k[:, t])
                made.append((num + first * v[:, t]) / (den + first))
                decay = torch.exp(-torch.exp(m["w"]["decay"]))
                num, den = decay * num + torch.exp(k[:, t]) * v[:, t], decay * den + torch.exp(k[:, t])
            x = x + m["o"](r * torch.stack(made, 1))
            h = m["ln2"](x)
            mixed = h * m["w"]["fmix"] + self.shift(h) * (1 - m["w"]["fmix"])
            x = x + torch.sigmoid(m["fr"](mixed)) * m["fv"](torch.square(torch.relu(m["fk"](mixed))))
        return self.head(x)


class AnnotatedTransformer(nn.Module):
    """`nn.Transformer` with padding and causal masks, as PyTorch's translation tutorial has it."""

    def __init__(self, vocab: int = 40, width: int = 48) -> None:
        super().__init__()
        self.src, self.tgt, self.width = nn.Embedding(vocab, width), nn.Embedding(vocab, width), width
        self.transformer = nn.Transformer(width, 4, 2, 2, 96, 0.1, batch_first=True)
        self.generator = nn.Linear(width, vocab)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            tgt.shape[1], device=src.device, dtype=self.tgt.weight.dtype
        )
        outs = self.transformer(
            self.src(src) * math.sqrt(self.width), self.tgt(tgt) * math.sqrt(self.width), tgt_mask=mask,
            src_key_padding_mask=src == 1, tgt_key_padding_mask=tgt == 1, memory_key_padding_mask=src == 1,
            tgt_is_causal=True,
        )  # fmt: skip
        return self.generator(outs)


class Bert(nn.Module):
    """An encoder with `einsum` attention, segment embeddings and two heads."""

    def __init__(self, vocab: int = 64, width: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.tok, self.seg, self.pos = nn.Embedding(vocab, width), nn.Embedding(3, width), nn.Embedding(16, width)
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ff = nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, width))
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.next, self.mask = nn.Linear(width, 2), nn.Linear(width, vocab)

    def forward(self, x: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
        keep = (x > 0).unsqueeze(1).repeat(1, x.size(1), 1).unsqueeze(1)
        h = self.tok(x) + self.seg(segment) + self.pos.weight[: x.shape[1]]
        q, k, v = self.qkv(h).reshape(*x.shape, 3, self.heads, -1).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.size(-1))
        attention = F.dropout(scores.masked_fill(keep == 0, -1e9).softmax(-1), 0.1, self.training)
        h = self.n1(h + self.out(torch.einsum("bhqk,bkhd->bqhd", attention, v).flatten(2)))
        h = self.n2(h + self.ff(h))
        return F.log_softmax(self.next(h[:, 0]), dim=-1), F.log_softmax(self.mask(h), dim=-1)


# --- sequences -------------------------------------------------------------------------------------------------------


class Seq2Seq(nn.Module):
    """PyTorch's seq2seq tutorial: a GRU reads, another writes step by step with Bahdanau's attention."""

    def __init__(self, vocab: int = 40, width: int = 32) -> None:
        super().__init__()
        self.emb, self.enc = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True)
        self.dec_emb, self.dec = nn.Embedding(vocab, width), nn.GRU(2 * width, width, batch_first=True)
        self.wa, self.ua, self.va = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)
        self.out = nn.Linear(width, vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        keys, hidden = self.enc(F.dropout(self.emb(source), 0.1, self.training))
        made = []
        for i in range(4):
            query = hidden.permute(1, 0, 2)
            scores = self.va(torch.tanh(self.wa(query) + self.ua(keys))).squeeze(2).unsqueeze(1)
            context = torch.bmm(F.softmax(scores, dim=-1), keys)
            step = F.dropout(self.dec_emb(target[:, i].unsqueeze(1)), 0.1, self.training)
            output, hidden = self.dec(torch.cat((step, context), dim=2), hidden)
            made.append(self.out(output))
        return F.log_softmax(torch.cat(made, dim=1), dim=-1)


class Tagger(nn.Module):
    """A BiLSTM over words and the characters' convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.chars = nn.Embedding(50, 24, padding_idx=0), nn.Embedding(30, 8)
        self.conv = nn.Conv1d(8, 16, 3, padding=1)
        self.lstm = nn.LSTM(40, 24, num_layers=2, bidirectional=True, dropout=0.2, batch_first=True)
        self.tags = nn.Linear(48, 9)

    def forward(self, words: Tensor, chars: Tensor) -> Tensor:
        b, t, c = chars.shape
        spelled = self.conv(self.chars(chars.view(b * t, c)).transpose(1, 2)).max(-1).values.view(b, t, -1)
        return self.tags(self.lstm(torch.cat([self.words(words), spelled], -1))[0])


class WaveNet(nn.Module):
    """Gated dilated convolutions with skips."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, width, 1)
        self.gate = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(layers))
        self.residual = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(layers))
        self.skip = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(layers))
        self.end = nn.Sequential(nn.ReLU(), nn.Conv1d(2 * width, 32, 1), nn.ReLU(), nn.Conv1d(32, 64, 1))

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.start(x), 0
        for i, (gate, residual, skip) in enumerate(zip(self.gate, self.residual, self.skip, strict=True)):
            a, b = gate(F.pad(x, (2**i, 0))).chunk(2, 1)
            z = torch.tanh(a) * torch.sigmoid(b)
            skips, x = skips + skip(z), x + residual(z)
        return self.end(skips)


class Tcn(nn.Module):
    """locuslab/TCN: weight norm, chomp, dropout."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.convs = nn.ModuleList(norm(nn.Conv1d(a, 24, 3, padding=2 * d, dilation=d)) for a, d in ((8, 1), (24, 2)))
        self.down, self.out = nn.Conv1d(8, 24, 1), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for i, conv in enumerate(self.convs):
            h = F.dropout(F.relu(conv(h)[:, :, : -(2 << i)].contiguous()), 0.2, self.training)
        return F.log_softmax(self.out(F.relu(h + self.down(x))[:, :, -1]), dim=1)


class TextCnn(nn.Module):
    """Kim (2014): kernels of three widths, the largest over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 24)
        self.convs = nn.ModuleList(nn.Conv2d(1, 16, (k, 24)) for k in (2, 3, 4))
        self.drop, self.fc = nn.Dropout(0.5), nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).unsqueeze(1)
        h = [F.relu(conv(h)).squeeze(3) for conv in self.convs]
        return self.fc(self.drop(torch.cat([F.max_pool1d(i, i.size(2)).squeeze(2) for i in h], 1)))


class DeepSpeech(nn.Module):
    """Convolutions over spectrograms, a bidirectional GRU, scores for CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.Hardtanh(0, 20))
        self.rnn, self.fc = nn.GRU(64, 32, num_layers=2, bidirectional=True), nn.Linear(64, 29, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        b, c, f, t = h.size()
        h, _ = self.rnn(h.view(b, c * f, t).permute(2, 0, 1).contiguous())
        return F.log_softmax(self.fc(h), dim=-1)


class TasNet(nn.Module):
    """Luo and Mesgarani (2019): a learned basis, masks by depthwise convolutions, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv1d(1, 32, 16, 8, bias=False), nn.ConvTranspose1d(32, 1, 16, 8, bias=False)
        self.body = nn.Sequential(
            nn.GroupNorm(1, 32), nn.Conv1d(32, 16, 1), nn.Conv1d(16, 48, 1), nn.PReLU(), nn.GroupNorm(1, 48),
            nn.Conv1d(48, 48, 3, padding=2, dilation=2, groups=48), nn.PReLU(), nn.Conv1d(48, 16, 1),
            nn.Conv1d(16, 64, 1),
        )  # fmt: skip

    def forward(self, mixture: Tensor) -> Tensor:
        w = F.relu(self.encoder(mixture))
        mask = F.softmax(self.body(w).view(w.shape[0], 2, 32, -1), dim=1)
        sources = w.unsqueeze(1) * mask
        return self.decoder(sources.flatten(0, 1)).view(w.shape[0], 2, -1)


# --- images ----------------------------------------------------------------------------------------------------------


def _twice(a: int, b: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
        nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    """milesial/Pytorch-UNet: transposed convolutions, padding to the size of the skip, concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down1, self.down2 = _twice(3, 8), _twice(8, 16), _twice(16, 32)
        self.up1, self.conv1 = nn.ConvTranspose2d(32, 16, 2, stride=2), _twice(32, 16)
        self.up2, self.conv2, self.outc = nn.ConvTranspose2d(16, 8, 2, stride=2), _twice(16, 8), nn.Conv2d(8, 2, 1)

    def _up(self, x: Tensor, skip: Tensor, up: nn.Module, conv: nn.Module) -> Tensor:
        x = up(x)
        dy, dx = skip.size()[2] - x.size()[2], skip.size()[3] - x.size()[3]
        return conv(torch.cat([skip, F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])], dim=1))

    def forward(self, x: Tensor) -> Tensor:
        a = self.inc(x)
        b = self.down1(F.max_pool2d(a, 2))
        c = self.down2(F.max_pool2d(b, 2))
        return self.outc(self._up(self._up(c, b, self.up1, self.conv1), a, self.up2, self.conv2))


class ResNet(nn.Module):
    """akamaster's ResNet for CIFAR: shortcuts by slicing and padding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.Linear(32, 10)
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.Conv2d(a, b, 3, s, 1, bias=False), nn.BatchNorm2d(b),
                           nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)])
            for a, b, s in ((16, 16, 1), (16, 32, 2))
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)))
        for conv1, bn1, conv2, bn2 in self.blocks:
            out = bn2(conv2(F.relu(bn1(conv1(x)))))
            if out.shape != x.shape:
                x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 8, 8), "constant", 0)
            x = F.relu(out + x)
        return self.fc(F.avg_pool2d(x, x.size()[3]).view(x.size(0), -1))


class Generator(nn.Module):
    """PyTorch's DCGAN tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(20, 32, 4, 1, 0, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
            nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
            nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x)


class Discriminator(nn.Module):
    """The other half, with spectral norm as later ones have it."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.main = nn.Sequential(
            norm(nn.Conv2d(3, 16, 4, 2, 1, bias=False)), nn.LeakyReLU(0.2, inplace=True),
            norm(nn.Conv2d(16, 32, 4, 2, 1, bias=False)), nn.LeakyReLU(0.2, inplace=True),
            norm(nn.Conv2d(32, 1, 4, 1, 0, bias=False)), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x).view(-1)


class Vae(nn.Module):
    """PyTorch's example, with its loss in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        self.fc3, self.fc4 = nn.Linear(8, 32), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.fc1(x.view(-1, 64)))
        mu, logvar = self.fc21(h), self.fc22(h)
        std = torch.exp(0.5 * logvar)
        z = mu + torch.randn_like(std) * std
        recon = torch.sigmoid(self.fc4(F.relu(self.fc3(z))))
        bce = F.binary_cross_entropy(recon, x.view(-1, 64), reduction="sum")
        return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


class SqueezeExcite(nn.Module):
    """Inverted residuals with squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(8, 32, 1, bias=False), nn.BatchNorm2d(32), nn.SiLU())
        self.deep = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False), nn.BatchNorm2d(32), nn.SiLU())
        self.se = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(32, 8, 1), nn.SiLU(), nn.Conv2d(8, 32, 1), nn.Sigmoid()
        )
        self.project = nn.Sequential(nn.Conv2d(32, 8, 1, bias=False), nn.BatchNorm2d(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.deep(self.expand(x))
        return x + self.project(h * self.se(h))


class Ddpm(nn.Module):
    """A noise predictor with sinusoidal time embeddings, group norms and attention over the pixels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, 32), nn.SiLU(), nn.Linear(32, width))
        self.head, self.tail = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.qkv, self.proj, self.width = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1), width

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        half = self.width // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half, device=x.device, dtype=x.dtype) / half)
        angles = t.to(x.dtype)[:, None] * freqs[None]
        emb = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        h = self.head(x)
        r = self.conv1(F.silu(self.norm1(h))) + emb[:, :, None, None]
        h = h + F.dropout(self.conv2(F.silu(self.norm2(r))), 0.1, self.training)
        b, c, height, wide = h.shape
        q, k, v = self.qkv(h).view(b, 3, c, height * wide).unbind(1)
        weights = torch.softmax(torch.bmm(q.transpose(1, 2), k) * c**-0.5, dim=-1)
        h = h + self.proj(torch.bmm(v, weights.transpose(1, 2)).view(b, c, height, wide))
        return self.tail(h)


# --- tables, points, graphs, and control -----------------------------------------------------------------------------


class Dlrm(nn.Module):
    """facebookresearch/dlrm: bags, a bottom and a top perceptron, pairwise dots by indexing the lower triangle."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(n, 16, mode="sum") for n in (100, 50, 30))
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(22, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())

    def forward(self, dense: Tensor, sparse: Tensor, offsets: Tensor) -> Tensor:
        x = self.bottom(dense)
        held = [bag(sparse[i] % bag.num_embeddings, offsets) for i, bag in enumerate(self.bags)]
        t = torch.cat([x, *held], dim=1).view((x.shape[0], -1, 16))
        z = torch.bmm(t, t.transpose(1, 2))
        li = torch.tensor([i for i in range(4) for _ in range(i)])
        lj = torch.tensor([j for i in range(4) for j in range(i)])
        return self.top(torch.cat([x, z[:, li, lj]], dim=1))


class DeepFm(nn.Module):
    """Factorisation machines beside a deep network."""

    def __init__(self) -> None:
        super().__init__()
        self.fm, self.linear = nn.Embedding(200, 12), nn.Embedding(200, 1)
        self.mlp = nn.Sequential(nn.Linear(60, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        e = self.fm(x)
        pairs = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(1, keepdim=True)
        return torch.sigmoid(self.linear(x).sum(1) + pairs + self.mlp(e.flatten(1))).squeeze(1)


class TwoTower(nn.Module):
    """Retrieval: normalised embeddings, in-batch negatives, a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.EmbeddingBag(100, 24), nn.Embedding(80, 24)
        self.left, self.right = nn.Linear(24, 32), nn.Linear(24, 32)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        u = F.normalize(self.left(self.user(users)), dim=-1)
        v = F.normalize(self.right(self.item(items)), dim=-1)
        logits = self.scale.exp() * u @ v.t()
        return F.cross_entropy(logits, torch.arange(len(users), device=users.device))


class PointNet(nn.Module):
    """Points by shared perceptrons, the largest over all, and a learned transform."""

    def __init__(self) -> None:
        super().__init__()
        self.t1, self.t2 = nn.Conv1d(3, 16, 1), nn.Linear(16, 9)
        self.c1, self.c2, self.c3 = nn.Conv1d(3, 32, 1), nn.Conv1d(32, 64, 1), nn.Conv1d(64, 96, 1)
        self.b1, self.b2, self.f1, self.f2 = nn.BatchNorm1d(32), nn.BatchNorm1d(64), nn.Linear(96, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        t = self.t2(torch.max(F.relu(self.t1(x)), 2)[0]).view(-1, 3, 3) + torch.eye(3, dtype=x.dtype)
        x = torch.bmm(x.transpose(2, 1), t).transpose(2, 1)
        x = self.c3(F.relu(self.b2(self.c2(F.relu(self.b1(self.c1(x)))))))
        return F.log_softmax(self.f2(F.relu(self.f1(torch.max(x, 2)[0]))), dim=1)


class Nerf(nn.Module):
    """Positional encoding, a skip, and volume rendering by a cumulative product."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(27, 48), nn.Linear(48, 48), nn.Linear(75, 48)])
        self.sigma, self.rgb = nn.Linear(48, 1), nn.Linear(48, 3)

    def forward(self, points: Tensor) -> Tensor:
        encoded = torch.cat([points, *(f(2.0**i * points) for i in range(4) for f in (torch.sin, torch.cos))], -1)
        h = encoded
        for i, layer in enumerate(self.layers):
            h = F.relu(layer(torch.cat([encoded, h], -1) if i == 2 else h))
        alpha = 1.0 - torch.exp(-F.relu(self.sigma(h)[..., 0]))
        ones = torch.ones_like(alpha[..., :1])
        weights = alpha * torch.cumprod(torch.cat([ones, 1.0 - alpha + 1e-10], -1), -1)[..., :-1]
        return torch.sum(weights[..., None] * torch.sigmoid(self.rgb(h)), -2)


class RealNvp(nn.Module):
    """A normalising flow of coupling layers with masks that are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("masks", torch.tensor([[0.0, 1.0] * 4, [1.0, 0.0] * 4]))
        self.s, self.t = (
            nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(), nn.Linear(32, 8), end()) for _ in range(2))
            for end in (nn.Tanh, nn.Identity)
        )

    def forward(self, x: Tensor) -> Tensor:
        logdet, z = x.new_zeros(x.shape[0]), x
        for i in reversed(range(2)):
            held = self.masks[i] * z
            s, t = self.s[i](held) * (1 - self.masks[i]), self.t[i](held) * (1 - self.masks[i])
            z = (1 - self.masks[i]) * (z - t) * torch.exp(-s) + held
            logdet = logdet - s.sum(dim=1)
        return -(logdet - 0.5 * z.square().sum(1)).mean()


class DuelingDqn(nn.Module):
    """Wang et al. (2016): a value, and advantages less their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(4, 16, 4, 2), nn.ReLU(), nn.Conv2d(16, 16, 3, 1), nn.ReLU(), nn.Flatten()
        )
        self.value = nn.Sequential(nn.Linear(400, 32), nn.ReLU(), nn.Linear(32, 1))
        self.advantage = nn.Sequential(nn.Linear(400, 32), nn.ReLU(), nn.Linear(32, 6))

    def forward(self, x: Tensor, actions: Tensor) -> Tensor:
        h = self.features(x / 255)
        advantage = self.advantage(h)
        q = self.value(h) + advantage - advantage.mean(dim=1, keepdim=True)
        return F.smooth_l1_loss(q.gather(1, actions.unsqueeze(1)).squeeze(1), q.detach().max(1)[0])


class Gcn(nn.Module):
    """Kipf and Welling (2017) on a dense normalised adjacency."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(12, 24) * 0.2), nn.Parameter(torch.randn(24, 5) * 0.2)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        a = adjacency + torch.eye(adjacency.size(0), dtype=x.dtype)
        d = a.sum(1).pow(-0.5)
        a = d.unsqueeze(1) * a * d.unsqueeze(0)
        h = F.dropout(F.relu(a @ (x @ self.w1)), 0.5, self.training)
        return F.log_softmax(a @ (h @ self.w2), dim=1)


class MixtureOfExperts(nn.Module):
    """Dense softmax gating over a list of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(24, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        weights = torch.zeros_like(self.gate(x)).scatter(-1, chosen, scores / scores.sum(-1, keepdim=True))
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Siamese(nn.Module):
    """Two images through one network, and the triplet's margin."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.PReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, 32))

    def forward(self, a: Tensor, p: Tensor, n: Tensor) -> Tensor:
        return F.triplet_margin_loss(self.net(a), self.net(p), self.net(n))


class MlpMixer(nn.Module):
    """Tokens mixed by a perceptron over the transposed patches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Conv2d(3, 32, 8, 8), nn.Linear(32, 10)
        self.tokens = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(2))
        self.channels = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).flatten(2).transpose(1, 2)
        for i, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            h = h + tokens(self.norms[2 * i](h).transpose(1, 2)).transpose(1, 2)
            h = h + channels(self.norms[2 * i + 1](h))
        return self.fc(h.mean(dim=1))


def _x(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def _ids(most: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, most, shape)


WRITTEN: dict[str, tuple[type[nn.Module], tuple[Callable[[], Any], ...]]] = {
    "nanoGPT": (NanoGPT, (_ids(65, 2, 10), _ids(65, 2, 10))),
    "minGPT": (MinGPT, (_ids(65, 2, 10),)),
    "llama, complex rotary": (Llama, (_ids(65, 2, 10),)),
    "RWKV": (Rwkv, (_ids(65, 2, 6),)),
    "nn.Transformer": (AnnotatedTransformer, (_ids(40, 2, 9), _ids(40, 2, 7))),
    "BERT by einsum": (Bert, (_ids(64, 2, 9), _ids(3, 2, 9))),
    "seq2seq with attention": (Seq2Seq, (_ids(40, 2, 7), _ids(40, 2, 5))),
    "BiLSTM tagger": (Tagger, (_ids(50, 2, 6), _ids(30, 2, 6, 5))),
    "WaveNet": (WaveNet, (_x(2, 1, 40),)),
    "TCN": (Tcn, (_x(2, 8, 20),)),
    "TextCNN": (TextCnn, (_ids(60, 2, 12),)),
    "DeepSpeech": (DeepSpeech, (_x(2, 1, 16, 20),)),
    "Conv-TasNet": (TasNet, (_x(2, 1, 160),)),
    "U-Net": (UNet, (_x(2, 3, 20, 20),)),
    "ResNet for CIFAR": (ResNet, (_x(4, 3, 16, 16),)),
    "DCGAN generator": (Generator, (_x(4, 20, 1, 1),)),
    "DCGAN discriminator": (Discriminator, (_x(4, 3, 16, 16),)),
    "VAE": (Vae, (lambda: torch.rand(4, 1, 8, 8),)),
    "squeeze and excitation": (SqueezeExcite, (_x(4, 8, 10, 10),)),
    "DDPM": (Ddpm, (_x(2, 3, 8, 8), _ids(10, 2))),
    "DLRM": (Dlrm, (_x(4, 13), _ids(30, 3, 8), lambda: torch.tensor([0, 2, 4, 6]))),
    "DeepFM": (DeepFm, (_ids(200, 6, 5),)),
    "two towers": (TwoTower, (_ids(100, 5, 4), _ids(80, 5))),
    "PointNet": (PointNet, (_x(3, 3, 30),)),
    "NeRF": (Nerf, (_x(6, 8, 3),)),
    "RealNVP": (RealNvp, (_x(6, 8),)),
    "dueling DQN": (DuelingDqn, (_x(3, 4, 16, 16), _ids(6, 3))),
    "GCN": (Gcn, (_x(10, 12), lambda: (torch.rand(10, 10) > 0.7).double())),
    "mixture of experts": (MixtureOfExperts, (_x(2, 5, 24),)),
    "Siamese network": (Siamese, (_x(3, 1, 16, 16), _x(3, 1, 16, 16), _x(3, 1, 16, 16))),
    "MLP-Mixer": (MlpMixer, (_x(2, 3, 32, 32),)),
}
"""Name -> the class, and what makes the arguments of a call."""
