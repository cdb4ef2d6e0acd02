"""Models of papers as their authors and readers write them by hand; each tiny.

Sciences, sets and graphs, memories, flows, speech, recommendation and time series: the idioms that `written.py` lacks
(complex spectra, gradients in forward, loops with state, buffers that forward writes, in-place writes, `einsum`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --- physics ---------------------------------------------------------------------------------------------------------


class Fno(nn.Module):
    """Li et al. (2020): complex weights multiply the lowest frequencies, which are written into zeros."""

    def __init__(self, width: int = 16, modes: int = 4) -> None:
        super().__init__()
        self.modes, self.lift, self.back = modes, nn.Linear(3, width), nn.Linear(width, 1)
        self.spectral = nn.ParameterList(
            nn.Parameter(torch.rand(width, width, modes, modes, 2) / width**2) for _ in range(4)
        )
        self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(2))

    def _layer(self, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        m, spectrum = self.modes, torch.fft.rfft2(x)
        out = torch.zeros_like(spectrum)
        low, high = torch.view_as_complex(low), torch.view_as_complex(high)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], low)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], high)
        return torch.fft.irfft2(out, s=x.shape[-2:])

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.linspace(0, 1, x.shape[1], device=x.device, dtype=x.dtype)
        grid = torch.stack(torch.meshgrid(rows, rows, indexing="ij"), -1).expand(x.shape[0], -1, -1, -1)
        h = self.lift(torch.cat([x, grid], -1)).permute(0, 3, 1, 2)
        for i, local in enumerate(self.local):
            h = F.gelu(self._layer(h, self.spectral[2 * i], self.spectral[2 * i + 1]) + local(h))
        return self.back(h.permute(0, 2, 3, 1))


class DeepONet(nn.Module):
    """Lu et al. (2019): a branch reads the function, a trunk the points; their product and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 24))
        self.trunk = nn.Sequential(nn.Linear(2, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh())
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, function: Tensor, points: Tensor) -> Tensor:
        return torch.einsum("bp,np->bn", self.branch(function), self.trunk(points)) + self.bias


class Siren(nn.Module):
    """Sitzmann et al. (2020): sines, with the gradient with respect to the points taken in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(2, 32), nn.Linear(32, 32), nn.Linear(32, 1)])

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        points = points.clone().detach().requires_grad_(True)
        h = points
        for layer in self.net[:-1]:
            h = torch.sin(30 * layer(h))
        out = self.net[-1](h)
        return out, torch.autograd.grad(out, points, torch.ones_like(out), create_graph=True)[0]


class Pinn(nn.Module):
    """Raissi et al. (2019): the residual of Burgers' equation by second gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
        self.viscosity = nn.Parameter(torch.tensor(0.01))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x, t = x.clone().requires_grad_(), t.clone().requires_grad_()
        u = self.net(torch.cat([x, t], 1))
        u_x, u_t = torch.autograd.grad(u.sum(), [x, t], create_graph=True)
        u_xx = torch.autograd.grad(u_x.sum(), x, create_graph=True)[0]
        return (u_t + u * u_x - self.viscosity * u_xx).pow(2).mean()


class NeuralOde(nn.Module):
    """Chen et al. (2018): Runge-Kutta by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(7, 24), nn.Linear(24, 6), nn.Linear(6, 3)

    def _slope(self, t: Tensor, y: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(torch.cat([y, t.expand(y.shape[0], 1)], 1))))

    def forward(self, y: Tensor) -> Tensor:
        times = torch.linspace(0, 1, 4, dtype=y.dtype, device=y.device)
        for start, end in pairwise(times):
            h = end - start
            k1 = self._slope(start, y)
            k2 = self._slope(start + h / 2, y + h * k1 / 2)
            k3 = self._slope(start + h / 2, y + h * k2 / 2)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + self._slope(end, y + h * k3))
        return self.head(y)


class Kan(nn.Module):
    """Liu et al. (2024) in its efficient form: B-splines by the recursion, a base of SiLU."""

    def __init__(self, sizes: tuple[int, ...] = (4, 16, 3), grid: int = 5, order: int = 3) -> None:
        super().__init__()
        self.order = order
        knots = torch.arange(-order, grid + order + 1) * (2 / grid) - 1
        self.base, self.spline = nn.ParameterList(), nn.ParameterList()
        for i, (a, b) in enumerate(pairwise(sizes)):
            self.register_buffer(f"grid{i}", knots.expand(a, -1).contiguous())
            self.base.append(nn.Parameter(torch.randn(b, a) / a))
            self.spline.append(nn.Parameter(torch.randn(b, a, grid + order) / a))

    def _splines(self, x: Tensor, grid: Tensor) -> Tensor:
        x = x.unsqueeze(-1)
        bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            rising = (x - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)]) * bases[:, :, :-1]
            bases = rising + (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:-k]) * bases[:, :, 1:]
        return bases.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        for i, (base, spline) in enumerate(zip(self.base, self.spline, strict=True)):
            bases = self._splines(x, getattr(self, f"grid{i}")).view(x.size(0), -1)
            x = F.linear(F.silu(x), base) + F.linear(bases, spline.view(spline.size(0), -1))
        return x


class S4d(nn.Module):
    """Gu et al. (2022): a diagonal complex state space, its kernel by Vandermonde, a convolution by FFT."""

    def __init__(self, width: int = 16, state: int = 8) -> None:
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(width) - 3)
        self.c = nn.Parameter(torch.randn(width, state // 2, 2))
        self.log_a_real = nn.Parameter(torch.log(0.5 * torch.ones(width, state // 2)))
        self.a_imag = nn.Parameter(math.pi * torch.arange(state // 2).repeat(width, 1).float())
        self.d, self.out = nn.Parameter(torch.randn(width)), nn.Conv1d(width, 2 * width, 1)

    def forward(self, u: Tensor) -> Tensor:
        length = u.size(-1)
        dt, c = torch.exp(self.log_dt), torch.view_as_complex(self.c)
        a = -torch.exp(self.log_a_real) + 1j * self.a_imag
        dta = a * dt.unsqueeze(-1)
        powers = dta.unsqueeze(-1) * torch.arange(length, device=u.device)
        k = 2 * torch.einsum("hn,hnl->hl", c * (torch.exp(dta) - 1.0) / a, torch.exp(powers)).real
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(k, n=2 * length), n=2 * length)
        return F.glu(self.out(F.gelu(y[..., :length] + u * self.d.unsqueeze(-1))), dim=1)


class SelectiveScan(nn.Module):
    """Mamba in the minimal form: a causal depthwise convolution, and the scan step by step."""

    def __init__(self, width: int = 16, inner: int = 32, state: int = 4, rank: int = 2) -> None:
        super().__init__()
        self.rank, self.state = rank, state
        self.norm, self.into = nn.RMSNorm(width), nn.Linear(width, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj, self.dt_proj = nn.Linear(inner, rank + 2 * state, bias=False), nn.Linear(rank, inner)
        self.a_log = nn.Parameter(torch.log(torch.arange(1.0, state + 1).repeat(inner, 1)))
        self.d, self.out = nn.Parameter(torch.ones(inner)), nn.Linear(inner, width, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        t = u.shape[1]
        x, gate = self.into(self.norm(u)).split([self.d.shape[0]] * 2, dim=-1)
        x = F.silu(self.conv(x.transpose(1, 2))[:, :, :t].transpose(1, 2))
        dt, read, write = self.x_proj(x).split([self.rank, self.state, self.state], dim=-1)
        dt, a = F.softplus(self.dt_proj(dt)), -torch.exp(self.a_log)
        decay, driven = torch.exp(torch.einsum("bld,dn->bldn", dt, a)), torch.einsum("bld,bln,bld->bldn", dt, read, x)
        h, made = torch.zeros_like(decay[:, 0]), []
        for i in range(t):
            h = decay[:, i] * h + driven[:, i]
            made.append(torch.einsum("bdn,bn->bd", h, write[:, i]))
        return u + self.out((torch.stack(made, dim=1) + x * self.d) * F.silu(gate))


class Egnn(nn.Module):
    """Satorras et al. (2021): messages by distance, coordinates moved along differences, sums by `index_add_`."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * width + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.coord = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1, bias=False))
        self.node = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, h: Tensor, x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        row, col = edges
        for _ in range(2):
            difference = x[row] - x[col]
            m = self.edge(torch.cat([h[row], h[col], difference.pow(2).sum(1, keepdim=True)], 1))
            moved = difference * self.coord(m)
            count = x.new_zeros(x.shape).scatter_add_(0, row.unsqueeze(1).expand(-1, 3), torch.ones_like(moved))
            x = x + x.new_zeros(x.shape).index_add_(0, row, moved) / count.clamp(min=1)
            h = h + self.node(torch.cat([h, h.new_zeros(h.shape).index_add_(0, row, m)], 1))
        return h, x


# --- flows, densities, energies --------------------------------------------------------------------------------------


class Glow(nn.Module):
    """Kingma and Dhariwal (2018): actnorm, an invertible 1x1 convolution by PLU, affine coupling, a squeeze."""

    def __init__(self, channels: int = 12) -> None:
        super().__init__()
        p, lower, upper = torch.linalg.lu(torch.linalg.qr(torch.randn(channels, channels))[0])
        self.register_buffer("p", p)
        self.register_buffer("sign", torch.sign(torch.diagonal(upper)))
        self.register_buffer("mask", torch.tril(torch.ones(channels, channels), -1))
        self.lower, self.upper = nn.Parameter(lower), nn.Parameter(torch.triu(upper, 1))
        self.log_s = nn.Parameter(torch.log(torch.diagonal(upper).abs()))
        self.loc, self.scale = nn.Parameter(torch.zeros(1, channels, 1, 1)), nn.Parameter(torch.ones(1, channels, 1, 1))
        self.net = nn.Sequential(nn.Conv2d(channels // 2, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, channels, 1))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        b, c, h, w = image.shape
        x = image.view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).contiguous().view(b, c * 4, h // 2, w // 2)
        pixels = x.shape[2] * x.shape[3]
        x = self.scale * (x + self.loc)
        weight = self.p @ (self.lower * self.mask + torch.eye(c * 4, dtype=x.dtype, device=x.device))
        weight = weight @ (self.upper * self.mask.T + torch.diag(self.sign * torch.exp(self.log_s)))
        x = F.conv2d(x, weight.unsqueeze(2).unsqueeze(3))
        a, rest = x.chunk(2, 1)
        log_s, shift = self.net(a).chunk(2, 1)
        s = torch.sigmoid(log_s + 2)
        det = pixels * (self.scale.abs().log().sum() + self.log_s.sum()) + torch.sum(torch.log(s).view(b, -1), 1)
        return torch.cat([a, (rest + shift) * s], 1), det


class Nice(nn.Module):
    """Dinh et al. (2014): additive coupling by strided slices, a diagonal scale, a logistic prior."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8)) for _ in range(3))
        self.log_s = nn.Parameter(torch.zeros(1, 16))

    def forward(self, x: Tensor) -> Tensor:
        for i, net in enumerate(self.nets):
            pairs = x.reshape(x.size(0), 8, 2)
            on, off = (pairs[:, :, 0], pairs[:, :, 1]) if i % 2 else (pairs[:, :, 1], pairs[:, :, 0])
            off = off + net(on)
            x = torch.stack((on, off) if i % 2 else (off, on), dim=2).reshape(x.size(0), 16)
        z = x * torch.exp(self.log_s)
        return (-(F.softplus(z) + F.softplus(-z)).sum(1) + self.log_s.sum()).mean()


class MixtureDensity(nn.Module):
    """Bishop (1994): the likelihood under a mixture, by `logsumexp`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 32), nn.Tanh())
        self.pi, self.mu, self.sigma = nn.Linear(32, 4), nn.Linear(32, 12), nn.Linear(32, 12)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.body(x)
        mu, sigma = self.mu(h).view(-1, 4, 3), torch.exp(self.sigma(h)).view(-1, 4, 3)
        log_p = -0.5 * ((y.unsqueeze(1) - mu) / sigma) ** 2 - torch.log(sigma) - 0.5 * math.log(2 * math.pi)
        return -torch.logsumexp(F.log_softmax(self.pi(h), 1) + log_p.sum(2), dim=1).mean()


class VqVae(nn.Module):
    """van den Oord et al. (2017): the nearest code by distances, one hot, straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 8, 3, 1, 1))
        self.book = nn.Embedding(16, 8)
        self.dec = nn.Sequential(nn.Conv2d(8, 16, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.enc(x).permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, 8)
        w = self.book.weight
        far = torch.sum(flat**2, dim=1, keepdim=True) + torch.sum(w**2, dim=1) - 2 * torch.matmul(flat, w.t())
        chosen = torch.argmin(far, dim=1).unsqueeze(1)
        hot = torch.zeros(chosen.shape[0], 16, device=x.device, dtype=x.dtype)
        hot.scatter_(1, chosen, 1)
        q = torch.matmul(hot, w).view(z.shape)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
        mean = hot.mean(0)
        perplexity = torch.exp(-torch.sum(mean * torch.log(mean + 1e-10)))
        return self.dec((z + (q - z).detach()).permute(0, 3, 1, 2).contiguous()), loss, perplexity


class VqEma(nn.Module):
    """The same codes moved by running means, which forward writes to buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(12, 8), nn.Linear(8, 12)
        book = torch.randn(16, 8)
        self.register_buffer("book", book)
        self.register_buffer("count", torch.ones(16))
        self.register_buffer("mean", book.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.enc(x)
        hot = F.one_hot(torch.cdist(z, self.book).argmin(-1), 16).type_as(z)
        if self.training:
            with torch.no_grad():
                self.count.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.mean.mul_(0.9).add_(hot.t() @ z, alpha=0.1)
                n = self.count.sum()
                self.book.copy_(self.mean / ((self.count + 1e-5) / (n + 16e-5) * n).unsqueeze(1))
        q = hot @ self.book
        return self.dec(z + (q - z).detach()), F.mse_loss(z, q.detach())


class Energy(nn.Module):
    """Du and Mordatch (2019): Langevin steps down the energy's gradient, then the contrastive loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 24), nn.SiLU(), nn.Linear(24, 24), nn.SiLU(), nn.Linear(24, 1))

    def forward(self, real: Tensor, start: Tensor) -> Tensor:
        x = start
        for _ in range(2):
            x = x.detach().requires_grad_(True)
            x = x - 0.1 * torch.autograd.grad(self.net(x).sum(), x)[0]
        good, bad = self.net(real), self.net(x.detach())
        return good.mean() - bad.mean() + 0.1 * (good**2 + bad**2).mean()


class ScoreMatching(nn.Module):
    """Song and Ermon (2019): denoising at random levels, with Fourier features of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.randn(8) * 30)
        self.time, self.up, self.down = nn.Linear(16, 24), nn.Linear(6, 24), nn.Linear(24, 6)

    def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        angle = t[:, None] * self.w[None, :] * 2 * math.pi
        time = F.silu(self.time(torch.cat([torch.sin(angle), torch.cos(angle)], -1)))
        std = torch.sqrt((25.0 ** (2 * t) - 1.0) / 2.0 / math.log(25.0))[:, None]
        score = self.down(F.silu(self.up(x + noise * std) + time)) / std
        return torch.mean(torch.sum((score * std + noise) ** 2, dim=-1))


# --- sets, slots, memories -------------------------------------------------------------------------------------------


class SetTransformer(nn.Module):
    """Lee et al. (2019): heads by `cat(split)` along the batch, inducing points, pooling by seeds."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.embed, self.head = nn.Linear(3, width), nn.Linear(width, 5)
        self.points, self.seed = nn.Parameter(torch.randn(1, 6, width)), nn.Parameter(torch.randn(1, 2, width))
        self.mab = nn.ModuleList(nn.ModuleDict({n: nn.Linear(width, width) for n in "qkvo"}) for _ in range(3))

    def _attend(self, m: Any, q: Tensor, k: Tensor) -> Tensor:
        q, k, v = m["q"](q), m["k"](k), m["v"](k)
        size = self.width // self.heads
        q_, k_, v_ = (torch.cat(y.split(size, 2), 0) for y in (q, k, v))
        a = torch.softmax(q_.bmm(k_.transpose(1, 2)) / math.sqrt(self.width), 2)
        out = torch.cat((q_ + a.bmm(v_)).split(q.size(0), 0), 2)
        return out + F.relu(m["o"](out))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        induced = self._attend(self.mab[0], self.points.repeat(h.size(0), 1, 1), h)
        h = self._attend(self.mab[1], h, induced)
        return self.head(self._attend(self.mab[2], self.seed.repeat(h.size(0), 1, 1), h)).squeeze()


class PointNet2(nn.Module):
    """Qi et al. (2017): farthest points, balls by sorted indices, gathered groups, interpolation back."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, 16, 1), nn.Conv2d(16, 24, 1)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(16), nn.BatchNorm2d(24)])
        self.back = nn.Conv1d(24, 5, 1)

    @staticmethod
    def _taken(points: Tensor, idx: Tensor) -> Tensor:
        batch = torch.arange(points.shape[0], device=points.device).view([-1] + [1] * (idx.dim() - 1))
        return points[batch.expand_as(idx), idx]

    def forward(self, xyz: Tensor) -> Tensor:
        b, n, _ = xyz.shape
        centroids = torch.zeros(b, 6, dtype=torch.long, device=xyz.device)
        distance, farthest = torch.ones(b, n, device=xyz.device, dtype=xyz.dtype) * 1e10, xyz[:, :, 0].argmax(1)
        for i in range(6):
            centroids[:, i] = farthest
            d = torch.sum((xyz - self._taken(xyz, farthest[:, None])) ** 2, -1)
            distance = torch.where(d < distance, d, distance)
            farthest = torch.max(distance, -1)[1]
        new = self._taken(xyz, centroids)
        far = torch.sum((new[:, :, None] - xyz[:, None]) ** 2, -1)
        group = torch.arange(n, device=xyz.device).view(1, 1, n).repeat(b, 6, 1)
        group[far > 1.5] = n
        group = group.sort(dim=-1)[0][:, :, :8]
        first = group[:, :, :1].expand_as(group)
        group = torch.where(group == n, first, group)
        h = (self._taken(xyz, group) - new.view(b, 6, 1, 3)).permute(0, 3, 2, 1)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h = F.relu(norm(conv(h)))
        h = torch.max(h, 2)[0].permute(0, 2, 1)
        d, idx = far.transpose(1, 2).sort(dim=-1)
        weight = 1.0 / (d[:, :, :3] + 1e-8)
        weight = weight / weight.sum(2, keepdim=True)
        return self.back(torch.sum(self._taken(h, idx[:, :, :3]) * weight.unsqueeze(-1), 2).transpose(1, 2))


class Dgcnn(nn.Module):
    """Wang et al. (2019): neighbours by `topk`, edges by flat indices into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(6, 16, 1, bias=False), nn.Conv2d(32, 24, 1, bias=False)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(16), nn.BatchNorm2d(24)])
        self.fc = nn.Linear(80, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for conv, norm in zip(self.convs, self.norms, strict=True):
            b, c, n = x.shape
            inner = -2 * torch.matmul(x.transpose(2, 1), x)
            square = torch.sum(x**2, dim=1, keepdim=True)
            idx = (-square - inner - square.transpose(2, 1)).topk(k=4, dim=-1)[1]
            idx = (idx + torch.arange(0, b, device=x.device).view(-1, 1, 1) * n).view(-1)
            points = x.transpose(2, 1).contiguous()
            near = points.view(b * n, -1)[idx, :].view(b, n, 4, c)
            own = points.view(b, n, 1, c).repeat(1, 1, 4, 1)
            x = F.leaky_relu(norm(conv(torch.cat((near - own, own), dim=3).permute(0, 3, 1, 2).contiguous())), 0.2)
            x = x.max(dim=-1, keepdim=False)[0]
            kept.append(x)
        h = torch.cat(kept, 1)
        pooled = (F.adaptive_max_pool1d(h, 1).view(b, -1), F.adaptive_avg_pool1d(h, 1).view(b, -1))
        return self.fc(torch.cat(pooled, 1))


class SlotAttention(nn.Module):
    """Locatello et al. (2020): slots compete by a softmax over themselves, a GRU cell moves them."""

    def __init__(self, width: int = 16, slots: int = 3) -> None:
        super().__init__()
        self.slots, self.width = slots, width
        self.mu, self.log_sigma = nn.Parameter(torch.randn(1, 1, width)), nn.Parameter(torch.zeros(1, 1, width))
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.gru = nn.GRUCell(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width))
        self.n1, self.n2, self.n3 = (nn.LayerNorm(width) for _ in range(3))

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        x = self.n1(x)
        k, v = self.k(x), self.v(x)
        b = x.shape[0]
        slots = self.mu.expand(b, self.slots, -1) + self.log_sigma.exp().expand(b, self.slots, -1) * noise
        for _ in range(3):
            q = self.q(self.n2(slots))
            a = (torch.einsum("bid,bjd->bij", q, k) * self.width**-0.5).softmax(dim=1) + 1e-8
            a = a / a.sum(dim=-1, keepdim=True)
            updates = torch.einsum("bjd,bij->bid", v, a)
            slots = self.gru(updates.reshape(-1, self.width), slots.reshape(-1, self.width)).reshape(b, -1, self.width)
            slots = slots + self.mlp(self.n3(slots))
        return slots


class Ntm(nn.Module):
    """Graves et al. (2014): addresses by content and by circular shifts; a memory that is read and written."""

    def __init__(self, rows: int = 8, width: int = 6, hidden: int = 24) -> None:
        super().__init__()
        self.rows, self.width = rows, width
        self.control, self.out = nn.LSTMCell(4 + width, hidden), nn.Linear(hidden + width, 4)
        self.read, self.write = nn.Linear(hidden, width + 6), nn.Linear(hidden, width + 6 + 2 * width)
        self.register_buffer("start", torch.rand(rows, width) * 0.1)

    def _address(self, o: Tensor, memory: Tensor, before: Tensor) -> Tensor:
        k, beta, g, s, gamma = torch.split(o, [self.width, 1, 1, 3, 1], dim=1)
        w = F.softmax(F.softplus(beta) * F.cosine_similarity(memory + 1e-16, k.unsqueeze(1) + 1e-16, dim=-1), dim=1)
        w, s = torch.sigmoid(g) * w + (1 - torch.sigmoid(g)) * before, F.softmax(s, dim=1)
        around = torch.cat([w[:, -1:], w, w[:, :1]], dim=1)
        w = F.conv1d(around.unsqueeze(0), s.unsqueeze(1), groups=w.shape[0]).squeeze(0)
        w = w ** (1 + F.softplus(gamma))
        return w / (w.sum(dim=1, keepdim=True) + 1e-16)

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        memory = self.start.repeat(b, 1, 1)
        r, h, c = (x.new_zeros(b, n) for n in (self.width, self.out.in_features - self.width, self.control.hidden_size))
        reads = writes = F.one_hot(torch.zeros(b, dtype=torch.long, device=x.device), self.rows).type_as(x)
        made = []
        for t in range(x.shape[1]):
            h, c = self.control(torch.cat([x[:, t], r], 1), (h, c))
            o = self.write(h)
            head, erase, add = torch.split(o, [self.width + 6, self.width, self.width], dim=1)
            writes = self._address(head, memory, writes)
            memory = memory * (1 - torch.einsum("bn,bm->bnm", writes, torch.sigmoid(erase)))
            memory = memory + torch.matmul(writes.unsqueeze(-1), add.unsqueeze(1))
            reads = self._address(self.read(h), memory, reads)
            r = torch.matmul(reads.unsqueeze(1), memory).squeeze(1)
            made.append(torch.sigmoid(self.out(torch.cat([h, r], 1))))
        return torch.stack(made, 1)


class Hopfield(nn.Module):
    """Ramsauer et al. (2020): stored patterns, the update repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.stored = nn.Parameter(torch.randn(20, 16))
        self.q, self.k, self.v = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.beta = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        state, keys = self.q(x), self.k(self.stored)
        for _ in range(3):
            a = torch.softmax(self.beta * state @ keys.T, -1)
            state = a @ keys
        return a @ self.v(keys)


class Capsules(nn.Module):
    """Sabour et al. (2017): squashed vectors, routing by agreement, a margin loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.primary = nn.Conv2d(1, 8, 5), nn.Conv2d(8, 16, 5, stride=2)
        self.w = nn.Parameter(0.1 * torch.randn(1, 36, 4, 8, 4))

    @staticmethod
    def _squashed(s: Tensor) -> Tensor:
        square = (s**2).sum(-1, keepdim=True)
        return square * s / ((1.0 + square) * torch.sqrt(square))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        u = self.primary(F.relu(self.conv(x)))
        u = self._squashed(u.view(x.size(0), 4, 4, 3, 3).permute(0, 1, 3, 4, 2).reshape(x.size(0), 36, 4))
        votes = torch.matmul(self.w, u[:, :, None, :, None].expand(-1, -1, 4, -1, -1)).squeeze(-1)
        b = torch.zeros(x.size(0), 36, 4, 1, device=x.device, dtype=x.dtype)
        for i in range(3):
            c = F.softmax(b, dim=2)
            v = self._squashed((c * votes).sum(dim=1, keepdim=True))
            if i < 2:
                b = b + (votes.detach() * v.detach()).sum(-1, keepdim=True)
        length = torch.sqrt((v.squeeze(1) ** 2).sum(-1))
        hot = torch.eye(4, device=x.device, dtype=x.dtype).index_select(0, y)
        loss = hot * F.relu(0.9 - length) ** 2 + 0.5 * (1 - hot) * F.relu(length - 0.1) ** 2
        return length, loss.sum(1).mean()


class PerceiverIo(nn.Module):
    """Jaegle et al. (2021): a latent array reads, thinks and is read, with `nn.MultiheadAttention`."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.latents, self.queries = nn.Parameter(torch.randn(6, width)), nn.Parameter(torch.randn(4, 24))
        self.reads = nn.MultiheadAttention(width, 4, kdim=12, vdim=12, batch_first=True)
        self.thinks = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.answers = nn.MultiheadAttention(24, 4, kdim=width, vdim=width, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b = x.size(0)
        h = self.latents.unsqueeze(0).expand(b, -1, -1)
        h = h + self.reads(h, x, x, need_weights=False)[0]
        for _ in range(2):
            h = h + self.thinks(h, h, h)[0]
            h = h + self.mlp(h)
        return self.answers(self.queries.repeat(b, 1, 1), h, h, average_attn_weights=False)


class HyperNetwork(nn.Module):
    """Ha et al. (2016): one network makes the kernels of another, which differ from sample to sample."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.first = nn.Linear(10, 16), nn.Linear(16, 16)
        self.kernels, self.biases = nn.Linear(16, 8 * 3 * 9), nn.Linear(16, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        b, c, h, w = x.shape
        code = F.relu(self.first(F.relu(self.code(z))))
        kernels, biases = self.kernels(code).view(b * 8, c, 3, 3), self.biases(code).view(-1)
        made = F.conv2d(x.reshape(1, b * c, h, w), kernels, biases, padding=1, groups=b)
        return self.head(F.relu(made).view(b, 8, h, w).mean((2, 3)))


# --- sequences and speech --------------------------------------------------------------------------------------------


class ConvLstm(nn.Module):
    """Shi et al. (2015): gates by a convolution, peepholes, frame by frame."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.hidden, self.conv = hidden, nn.Conv2d(3 + hidden, 4 * hidden, 3, padding=1)
        self.wci, self.wco = nn.Parameter(torch.zeros(1, hidden, 6, 6)), nn.Parameter(torch.zeros(1, hidden, 6, 6))
        self.out = nn.Conv2d(hidden, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _, height, width = x.size()
        h = c = torch.zeros(b, self.hidden, height, width, device=x.device, dtype=x.dtype)
        made = []
        for step in range(t):
            i, f, g, o = torch.split(self.conv(torch.cat([x[:, step], h], dim=1)), self.hidden, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i + self.wci * c) * torch.tanh(g)
            h = torch.sigmoid(o + self.wco * c) * torch.tanh(c)
            made.append(self.out(h))
        return torch.stack(made, dim=1)


class Tacotron(nn.Module):
    """Wang et al. (2017): a bank of convolutions with highways, location-sensitive attention, a decoder with frames."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, width)
        self.bank = nn.ModuleList(nn.Conv1d(width, width, k, padding=k // 2) for k in (1, 2, 3))
        self.pool, self.project = nn.MaxPool1d(2, stride=1, padding=1), nn.Conv1d(3 * width, width, 3, padding=1)
        self.h, self.t = nn.Linear(width, width), nn.Linear(width, width)
        self.gru = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.pre, self.cell = nn.Linear(8, width), nn.LSTMCell(2 * width, width)
        self.query, self.memory, self.v = (nn.Linear(width, a, bias=False) for a in (width, width, 1))
        self.where, self.place = nn.Conv1d(1, 4, 3, padding=1, bias=False), nn.Linear(4, width, bias=False)
        self.out, self.stop = nn.Linear(2 * width, 8), nn.Linear(2 * width, 1)

    def forward(self, text: Tensor, frames: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embed(text).transpose(1, 2)
        banked = self.pool(torch.cat([conv(x)[:, :, : text.shape[1]] for conv in self.bank], 1))[:, :, : text.shape[1]]
        x = (self.project(banked) + x).transpose(1, 2)
        gate = torch.sigmoid(self.t(x))
        keys = self.gru(F.relu(self.h(x)) * gate + x * (1.0 - gate))[0]
        memory = self.memory(keys)
        b = text.shape[0]
        hidden, cell, context = (x.new_zeros(b, x.shape[2]) for _ in range(3))
        sums, made, stops = x.new_zeros(b, text.shape[1]), [], []
        for frame in torch.cat([frames.new_zeros(b, 1, 8), frames[:, :-1]], 1).unbind(1):
            pre = F.dropout(F.relu(self.pre(frame)), 0.5, training=True)
            hidden, cell = self.cell(torch.cat([pre, context], -1), (hidden, cell))
            place = self.place(self.where(sums.unsqueeze(1)).transpose(1, 2))
            a = F.softmax(self.v(torch.tanh(self.query(hidden).unsqueeze(1) + memory + place)).squeeze(-1), dim=1)
            sums, context = sums + a, torch.bmm(a.unsqueeze(1), keys).squeeze(1)
            both = torch.cat([hidden, context], -1)
            made.append(self.out(both))
            stops.append(self.stop(both).squeeze(1))
        return torch.stack(made, 1), torch.stack(stops, 1), sums


class Pointer(nn.Module):
    """Vinyals et al. (2015): each step points at an input that is masked afterwards."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.cell = nn.Linear(2, width), nn.LSTMCell(width, width)
        self.enc, self.v = nn.LSTM(width, width, batch_first=True), nn.Linear(width, 1)
        self.w1, self.w2 = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.start = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, n, _ = x.shape
        e = self.embed(x)
        keys, (h, c) = self.enc(e)
        h, c, mask = h[0], c[0], torch.zeros(b, n, dtype=torch.bool, device=x.device)
        step, made, chosen = self.start.expand(b, -1), [], []
        for _ in range(n):
            h, c = self.cell(step, (h, c))
            u = self.v(torch.tanh(self.w1(keys) + self.w2(h).unsqueeze(1))).squeeze(-1)
            u = u.masked_fill(mask, float("-inf"))
            idx = u.argmax(1)
            mask = mask.scatter(1, idx.unsqueeze(1), True)
            step = e[torch.arange(b, device=x.device), idx]
            made.append(torch.softmax(u, 1))
            chosen.append(idx)
        return torch.stack(made, 1), torch.stack(chosen, 1)


class Crf(nn.Module):
    """A BiLSTM and a linear-chain CRF: the forward algorithm with padding, and the score of the given tags."""

    def __init__(self, tags: int = 5) -> None:
        super().__init__()
        self.emb, self.lstm = nn.Embedding(30, 16), nn.LSTM(16, 12, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(24, tags)
        self.start, self.end = nn.Parameter(torch.randn(tags)), nn.Parameter(torch.randn(tags))
        self.transitions = nn.Parameter(torch.randn(tags, tags))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        e = self.fc(self.lstm(self.emb(x))[0]).transpose(0, 1)
        y, m = y.t(), mask.t()
        t, b = y.shape
        rows = torch.arange(b, device=x.device)
        score = self.start[y[0]] + e[0, rows, y[0]]
        for i in range(1, t):
            score = score + (self.transitions[y[i - 1], y[i]] + e[i, rows, y[i]]) * m[i]
        score = score + self.end[y[m.long().sum(0) - 1, rows]]
        alpha = self.start + e[0]
        for i in range(1, t):
            following = torch.logsumexp(alpha.unsqueeze(2) + self.transitions + e[i].unsqueeze(1), dim=1)
            alpha = torch.where(m[i].unsqueeze(1), following, alpha)
        return -(score - torch.logsumexp(alpha + self.end, dim=1)).mean()


class TreeLstm(nn.Module):
    """Tai et al. (2015): a full binary tree, level by level, with a forget gate for each child."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.leaf, self.iou = nn.Linear(12, 3 * width), nn.Linear(2 * width, 3 * width)
        self.forget, self.head = nn.Linear(2 * width, 2 * width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        i, o, u = self.leaf(x).chunk(3, -1)
        c = torch.sigmoid(i) * torch.tanh(u)
        h = torch.sigmoid(o) * torch.tanh(c)
        while h.shape[1] > 1:
            both = h.reshape(h.shape[0], h.shape[1] // 2, -1)
            i, o, u = self.iou(both).chunk(3, -1)
            f = torch.sigmoid(self.forget(both)).view(*both.shape[:2], 2, -1)
            c = torch.sigmoid(i) * torch.tanh(u) + (f * c.view_as(f)).sum(2)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.head(h[:, 0])


class GruD(nn.Module):
    """Che et al. (2018): gaps decay inputs and states; missing values are the mean, or the last one seen."""

    def __init__(self, size: int = 6, hidden: int = 16) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(size))
        self.decay_x, self.decay_h = nn.Parameter(torch.rand(size)), nn.Linear(size, hidden)
        self.gates, self.new, self.fc = (nn.Linear(2 * size + hidden, 2 * hidden),
                                         nn.Linear(2 * size + hidden, hidden), nn.Linear(hidden, 2))  # fmt: skip

    def forward(self, x: Tensor, mask: Tensor, delta: Tensor) -> Tensor:
        h, last = x.new_zeros(x.size(0), self.new.out_features), torch.zeros_like(x[:, 0])
        for t in range(x.size(1)):
            m, d = mask[:, t], delta[:, t]
            last = m * x[:, t] + (1 - m) * last
            gamma = torch.exp(-torch.max(torch.zeros_like(d), d * self.decay_x))
            now = m * x[:, t] + (1 - m) * (gamma * last + (1 - gamma) * self.mean)
            h = torch.exp(-F.relu(self.decay_h(d))) * h
            z, r = torch.sigmoid(self.gates(torch.cat((now, h, m), 1))).chunk(2, 1)
            h = (1 - z) * h + z * torch.tanh(self.new(torch.cat((now, r * h, m), 1)))
        return self.fc(h)


class Transducer(nn.Module):
    """Graves (2012): the joint network's lattice, and its loss by the recursion over both axes."""

    def __init__(self, vocab: int = 10, width: int = 16) -> None:
        super().__init__()
        self.enc, self.emb = nn.LSTM(8, width, batch_first=True), nn.Embedding(vocab, width)
        self.pred, self.joint = nn.GRU(width, width, batch_first=True), nn.Linear(width, vocab)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        f, g = self.enc(x)[0], self.pred(F.pad(self.emb(y), (0, 0, 1, 0)))[0]
        p = F.log_softmax(self.joint(torch.tanh(f.unsqueeze(2) + g.unsqueeze(1))), -1)
        blank = p[..., 0]
        label = p[:, :, :-1].gather(3, y[:, None, :, None].expand(-1, x.shape[1], -1, 1)).squeeze(3)
        alpha: list[list[Tensor]] = []
        for t in range(x.shape[1]):
            row: list[Tensor] = []
            for u in range(y.shape[1] + 1):
                came = [alpha[t - 1][u] + blank[:, t - 1, u]] if t else []
                came += [row[u - 1] + label[:, t, u - 1]] if u else []
                row.append(torch.logsumexp(torch.stack(came), 0) if came else torch.zeros_like(blank[:, 0, 0]))
            alpha.append(row)
        return -(alpha[-1][-1] + blank[:, -1, -1]).mean()


class Highway(nn.Module):
    """Kim et al. (2016): words by characters' convolutions, highways, an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.chars = nn.Embedding(30, 8)
        self.convs = nn.ModuleList(nn.Conv2d(1, n, (k, 8)) for k, n in ((1, 8), (2, 12), (3, 12)))
        self.highway = nn.ModuleList(nn.Linear(32, 64) for _ in range(2))
        self.lstm, self.out = nn.LSTM(32, 24, 2, batch_first=True), nn.Linear(24, 50)

    def forward(self, x: Tensor) -> Tensor:
        b, t, n = x.shape
        e = self.chars(x.contiguous().view(-1, n)).unsqueeze(1)
        h = torch.cat([torch.tanh(torch.max(conv(e), 2)[0]).squeeze(2) for conv in self.convs], 1)
        for layer in self.highway:
            made, gate = layer(h).chunk(2, dim=-1)
            h = torch.sigmoid(gate) * F.relu(made) + (1 - torch.sigmoid(gate)) * h
        return self.out(self.lstm(h.view(b, t, -1))[0]).view(-1, 50)


class Speedrun(nn.Module):
    """modded-nanogpt's idioms: stacked qkv, half-truncated rotary tables, QK norm, value embeddings, U-Net skips."""

    def __init__(self, vocab: int = 64, width: int = 32, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.heads, self.layers, size = heads, layers, width // heads
        self.embed, self.values = nn.Embedding(vocab, width), nn.Embedding(vocab, width)
        self.qkv = nn.ParameterList(nn.Parameter(torch.randn(3, width, width) * 0.1) for _ in range(layers))
        self.up = nn.ParameterList(nn.Parameter(torch.randn(4 * width, width) * 0.1) for _ in range(layers))
        self.down = nn.ParameterList(nn.Parameter(torch.randn(width, 4 * width) * 0.1) for _ in range(layers))
        self.proj = nn.ParameterList(nn.Parameter(torch.randn(width, width) * 0.1) for _ in range(layers))
        self.skips, self.mix = nn.Parameter(torch.ones(layers // 2)), nn.Parameter(torch.rand(layers, 2))
        self.lambdas = nn.Parameter(torch.rand(layers, 2))
        self.head = nn.Parameter(torch.randn(vocab, width) * 0.1)
        angular = (1 / 1024) ** torch.linspace(0, 1, steps=size // 4)
        theta = torch.outer(torch.arange(16), torch.cat([angular, angular.new_zeros(size // 4)]))
        self.register_buffer("cos", theta.cos(), persistent=False)
        self.register_buffer("sin", theta.sin(), persistent=False)

    def _rotated(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[None, : x.size(1), None, :], self.sin[None, : x.size(1), None, :]
        x1, x2 = x.to(cos.dtype).chunk(2, dim=-1)
        return torch.cat((x1 * cos + x2 * sin, x1 * (-sin) + x2 * cos), 3).type_as(x)

    def forward(self, idx: Tensor, target: Tensor) -> Tensor:
        b, t = idx.shape
        x = x0 = F.rms_norm(self.embed(idx), (self.embed.embedding_dim,))
        ve, kept = self.values(idx).view(b, t, self.heads, -1), []
        for i in range(self.layers):
            if i >= self.layers // 2:
                x = x + self.skips[i - self.layers // 2] * kept.pop()
            x = self.mix[i, 0] * x + self.mix[i, 1] * x0
            h = F.rms_norm(x, (x.size(-1),))
            q, k, v = F.linear(h, self.qkv[i].flatten(end_dim=1)).view(b, t, 3 * self.heads, -1).chunk(3, dim=-2)
            q, k = (self._rotated(F.rms_norm(y, (y.size(-1),))) for y in (q, k))
            v = self.lambdas[i, 0] * v + self.lambdas[i, 1] * ve
            y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
            x = x + F.linear(y.transpose(1, 2).contiguous().view(b, t, -1), self.proj[i])
            x = x + F.linear(F.relu(F.linear(F.rms_norm(x, (x.size(-1),)), self.up[i])).square(), self.down[i])
            if i < self.layers // 2:
                kept.append(x)
        logits = 15 * torch.tanh(F.linear(F.rms_norm(x, (x.size(-1),)), self.head).float() / 15)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), target.view(-1))


class TokenExperts(nn.Module):
    """torchtitan's mixture: tokens sorted by expert, a capacity each, products of stacked weights, scattered back."""

    def __init__(self, width: int = 16, hidden: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.experts, self.gate = experts, nn.Linear(width, experts, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.randn(experts, hidden, width) * 0.1) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(experts, width, hidden) * 0.1)
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("seen", torch.zeros(experts))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        x = x.view(-1, d)
        scores = torch.sigmoid(self.gate(x))
        _, chosen = torch.topk(scores + self.bias, 2, dim=1)
        top = scores.gather(1, chosen)
        top = top / (top.sum(-1, keepdim=True) + 1e-20)
        with torch.no_grad():
            self.seen.add_(torch.bincount(chosen.view(-1), minlength=self.experts))
        order = torch.argsort(chosen.view(-1), stable=True)
        tokens, expert = order // 2, chosen.view(-1)[order]
        h = x[tokens] * top.view(-1)[order].unsqueeze(1)
        gate, up = (torch.einsum("nd,nhd->nh", h, w[expert]) for w in (self.w1, self.w3))
        made = torch.einsum("nh,ndh->nd", F.silu(gate) * up, self.w2[expert])
        return torch.zeros_like(x).scatter_add(0, tokens.unsqueeze(1).expand(-1, d), made).view(b, t, d)


# --- recommendation and tables ---------------------------------------------------------------------------------------


class SasRec(nn.Module):
    """Kang and McAuley (2018): causal attention over items with padding zeroed, scores of two items a step."""

    def __init__(self, items: int = 50, width: int = 16) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(items + 1, width, padding_idx=0), nn.Embedding(10, width)
        self.attention = nn.ModuleList(nn.MultiheadAttention(width, 2, 0.1) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-8) for _ in range(5))
        self.convs = nn.ModuleList(nn.Conv1d(width, width, kernel_size=1) for _ in range(4))

    def forward(self, seqs: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        x = self.items(seqs) * self.items.embedding_dim**0.5
        x = x + self.places(torch.arange(seqs.shape[1], device=seqs.device).expand_as(seqs))
        padding = seqs == 0
        x = x * ~padding.unsqueeze(-1)
        mask = ~torch.tril(torch.ones((seqs.shape[1],) * 2, dtype=torch.bool, device=seqs.device))
        for i, attention in enumerate(self.attention):
            x = torch.transpose(x, 0, 1)
            q = self.norms[2 * i](x)
            x = torch.transpose(q + attention(q, x, x, attn_mask=mask)[0], 0, 1)
            x = self.norms[2 * i + 1](x)
            h = self.convs[2 * i + 1](F.relu(self.convs[2 * i](x.transpose(-1, -2))))
            x = (x + h.transpose(-1, -2)) * ~padding.unsqueeze(-1)
        x = self.norms[-1](x)
        return (x * self.items(positive)).sum(-1), (x * self.items(negative)).sum(-1)


class Bert4Rec(nn.Module):
    """Sun et al. (2019): masked positions chosen by `gather`, scores by the tied table and a bias."""

    def __init__(self, items: int = 50, width: int = 16) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(items, width), nn.Embedding(10, width)
        layer = nn.TransformerEncoderLayer(width, 4, 32, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.transform, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(items))

    def forward(self, seqs: Tensor, masked: Tensor) -> Tensor:
        h = self.encoder(self.items(seqs) + self.places.weight[: seqs.shape[1]], src_key_padding_mask=seqs == 0)
        h = h.gather(1, masked.unsqueeze(-1).expand(-1, -1, h.shape[-1]))
        return F.linear(self.norm(F.gelu(self.transform(h))), self.items.weight, self.bias)


class AutoInt(nn.Module):
    """Song et al. (2019): one table for all fields by offsets, heads by split and stack, a projected residual."""

    def __init__(self, fields: tuple[int, ...] = (10, 20, 30), width: int = 8) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.tensor([0, *fields[:-1]]).cumsum(0))
        self.embed = nn.Embedding(sum(fields), width)
        self.w = nn.ParameterList(nn.Parameter(torch.randn(width, 16) * 0.1) for _ in range(4))
        self.head = nn.Linear(48, 1)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embed(x + self.offsets.unsqueeze(0))
        q, k, v = (torch.stack(torch.split(torch.tensordot(e, w, dims=([-1], [0])), 8, dim=2)) for w in self.w[:3])
        a = F.softmax(torch.einsum("hbik,hbjk->hbij", q, k) / 8**0.5, dim=-1)
        out = torch.cat(torch.split(torch.matmul(a, v), 1), dim=-1).squeeze(0)
        out = F.relu(out + torch.tensordot(e, self.w[3], dims=([-1], [0])))
        return torch.sigmoid(self.head(torch.flatten(out, start_dim=1)).squeeze(1))


class DcnV2(nn.Module):
    """Wang et al. (2021): low-rank crosses by a mixture of experts, beside a deep tower."""

    def __init__(self, size: int = 16, rank: int = 4, experts: int = 2) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.randn(2, experts, size, rank) * 0.1)
        self.v = nn.Parameter(torch.randn(2, experts, size, rank) * 0.1)
        self.c = nn.Parameter(torch.randn(2, experts, rank, rank) * 0.1)
        self.bias = nn.Parameter(torch.zeros(2, size, 1))
        self.gating = nn.ModuleList(nn.Linear(size, 1) for _ in range(2))
        self.deep, self.out = nn.Sequential(nn.Linear(size, 32), nn.BatchNorm1d(32), nn.ReLU()), nn.Linear(48, 1)

    def forward(self, x: Tensor) -> Tensor:
        x0 = x.unsqueeze(2)
        xl = x0
        for i in range(2):
            made, gates = [], []
            for e, gating in enumerate(self.gating):
                gates.append(gating(xl.squeeze(2)))
                low = torch.tanh(self.c[i][e] @ torch.tanh(self.v[i][e].t() @ xl))
                made.append((x0 * (torch.matmul(self.u[i][e], low) + self.bias[i])).squeeze(2))
            mixed = torch.matmul(torch.stack(made, 2), torch.stack(gates, 1).softmax(1))
            xl = mixed + xl
        return self.out(torch.cat([xl.squeeze(2), self.deep(x)], 1))


class FtTransformer(nn.Module):
    """Gorishniy et al. (2021): a token for each number and category, a class token, ReGLU."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, width)), nn.Parameter(torch.randn(5 + 3, width))
        self.table = nn.Embedding(30, width)
        self.register_buffer("offsets", torch.tensor([0, 10, 20]))
        self.qkv, self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(3)), nn.Linear(width, width)
        self.norm0, self.norm1, self.norm = (nn.LayerNorm(width) for _ in range(3))
        self.up, self.down, self.head = nn.Linear(width, 64), nn.Linear(32, width), nn.Linear(width, 2)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        ones = torch.ones(len(numbers), 1, device=numbers.device, dtype=numbers.dtype)
        x = self.weight[None] * torch.cat([ones, numbers], dim=1)[:, :, None]
        x = torch.cat([x, self.table(categories + self.offsets[None])], dim=1)
        zero = torch.zeros(1, self.bias.shape[1], device=x.device, dtype=x.dtype)
        x = x + torch.cat([zero, self.bias])[None]
        b, n, d = x.shape
        q, k, v = (y(self.norm0(x)) for y in self.qkv)
        q, k = (y.reshape(b, n, 4, d // 4).transpose(1, 2).reshape(b * 4, n, d // 4) for y in (q, k))
        a = F.dropout(F.softmax(q @ k.transpose(1, 2) / math.sqrt(d // 4), -1), 0.1, self.training)
        h = a @ v.reshape(b, n, 4, d // 4).transpose(1, 2).reshape(b * 4, n, d // 4)
        x = x + self.out(h.reshape(b, 4, n, d // 4).transpose(1, 2).reshape(b, n, d))
        up, gate = self.up(self.norm1(x)).chunk(2, dim=-1)
        x = x + self.down(up * F.relu(gate))
        return self.head(F.relu(self.norm(x[:, 0])))


class Trees(nn.Module):
    """NODE (Popov et al. 2019): oblivious trees; features and thresholds soft, leaves by products of bins."""

    def __init__(self, size: int = 8, trees: int = 6, depth: int = 3) -> None:
        super().__init__()
        self.response = nn.Parameter(torch.randn(trees, 3, 2**depth))
        self.select = nn.Parameter(torch.rand(size, trees, depth))
        self.thresholds, self.log_t = nn.Parameter(torch.randn(trees, depth)), nn.Parameter(torch.randn(trees, depth))
        codes = (torch.arange(2**depth).view(1, -1) // 2 ** torch.arange(depth).view(-1, 1)) % 2
        self.register_buffer("codes", torch.stack([codes, 1 - codes], dim=-1).float())

    def forward(self, x: Tensor) -> Tensor:
        values = torch.einsum("bi,ind->bnd", x, F.softmax(self.select, dim=0))
        logits = (values - self.thresholds) * torch.exp(-self.log_t)
        bins = torch.clamp(0.5 * torch.stack([-logits, logits], dim=-1) + 0.5, 0, 1)
        matches = torch.einsum("btds,dcs->btdc", bins, self.codes)
        return torch.einsum("bnd,ncd->bnc", torch.prod(matches, dim=-2), self.response).flatten(1, 2)


class DeepInterest(nn.Module):
    """DIN (Zhou et al. 2018): a target attends to the history through a perceptron of four parts; Dice."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.items, self.norm = nn.Embedding(60, width), nn.BatchNorm1d(16, affine=False)
        self.a1, self.a2, self.f1, self.f2 = (nn.Linear(4 * width, 16), nn.Linear(16, 1), nn.Linear(2 * width, 16),
                                              nn.Linear(16, 1))  # fmt: skip
        self.alpha = nn.Parameter(torch.zeros(16))

    def forward(self, target: Tensor, history: Tensor) -> Tensor:
        q, keys = self.items(target), self.items(history)
        qs = q.unsqueeze(1).expand_as(keys)
        scores = self.a2(torch.sigmoid(self.a1(torch.cat([qs, keys, qs - keys, qs * keys], -1)))).transpose(1, 2)
        scores = torch.where((history > 0).unsqueeze(1), scores, torch.ones_like(scores) * (-(2**32) + 1))
        h = self.f1(torch.cat([q, torch.matmul(F.softmax(scores, -1), keys).squeeze(1)], -1))
        p = torch.sigmoid(self.norm(h))
        return torch.sigmoid(self.f2(p * h + (1 - p) * self.alpha * h)).squeeze(-1)


# --- time series -----------------------------------------------------------------------------------------------------


class NBeats(nn.Module):
    """Oreshkin et al. (2019): trend and seasonal bases in buffers, backcasts subtracted."""

    def __init__(self, back: int = 12, ahead: int = 4, width: int = 24) -> None:
        super().__init__()
        t = torch.linspace(0, 1, back + ahead)
        trend = torch.stack([t**i for i in range(3)])
        season = torch.cat([torch.stack([f(2 * math.pi * i * t) for i in range(3)]) for f in (torch.cos, torch.sin)])
        self.back = back
        self.register_buffer("trend", trend)
        self.register_buffer("season", season)
        self.bodies = nn.ModuleList(nn.Sequential(nn.Linear(back, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
                                    for _ in range(3))  # fmt: skip
        self.theta = nn.ModuleList(nn.Linear(width, 2 * n, bias=False) for n in (3, 6, back + ahead))

    def forward(self, x: Tensor) -> Tensor:
        forecast: Tensor | float = 0.0
        for body, theta, basis in zip(self.bodies, self.theta, (self.trend, self.season, None), strict=True):
            a, b = theta(body(x)).chunk(2, -1)
            backcast, made = ((y if basis is None else y @ basis) for y in (a, b))
            x, forecast = x - backcast[:, : self.back], forecast + made[:, self.back :]
        return forecast


class Tft(nn.Module):
    """Lim et al. (2021): gated residuals, variable selection, an LSTM, attention with shared values, quantiles."""

    def __init__(self, inputs: int = 4, width: int = 16) -> None:
        super().__init__()
        self.width, self.embed = width, nn.ModuleList(nn.Linear(1, width) for _ in range(inputs))
        self.grn = nn.ModuleList(self._made(width, width) for _ in range(inputs + 1))
        self.choose = self._made(inputs * width, inputs)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.q, self.k = (nn.ModuleList(nn.Linear(width, 4) for _ in range(4)) for _ in range(2))
        self.v, self.w, self.out = nn.Linear(width, 4), nn.Linear(4, width, bias=False), nn.Linear(width, 3)

    @staticmethod
    def _made(a: int, b: int) -> nn.ModuleDict:
        return nn.ModuleDict({"up": nn.Linear(a, 16), "down": nn.Linear(16, b), "gate": nn.Linear(b, 2 * b),
                              "skip": nn.Linear(a, b), "norm": nn.LayerNorm(b)})  # fmt: skip

    @staticmethod
    def _gated(m: Any, x: Tensor) -> Tensor:
        return m["norm"](m["skip"](x) + F.glu(m["gate"](m["down"](F.elu(m["up"](x)))), dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        e = [embed(x[..., i].unsqueeze(-1)) for i, embed in enumerate(self.embed)]
        weights = F.softmax(self._gated(self.choose, torch.cat(e, -1)), -1).unsqueeze(2)
        each = torch.stack([self._gated(m, v) for m, v in zip(self.grn, e, strict=False)], dim=-1)
        h, _ = self.lstm((each * weights).sum(-1))
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], device=x.device), 1).bool()
        v, heads = self.v(h), []
        for q, k in zip(self.q, self.k, strict=True):
            scores = torch.bmm(q(h), k(h).permute(0, 2, 1)) / 2.0
            heads.append(torch.bmm(F.softmax(scores.masked_fill(mask, -1e9), 2), v))
        h = h + self.w(torch.stack(heads, dim=2).mean(dim=2))
        return self.out(self._gated(self.grn[-1], h))


class UNet3d(nn.Module):
    """Cicek et al. (2016): volumes, instance norms, trilinear upsampling, a Dice loss."""

    def __init__(self) -> None:
        super().__init__()

        def block(a: int, b: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv3d(a, b, 3, padding=1), nn.InstanceNorm3d(b, affine=True), nn.LeakyReLU(0.01))

        self.down = nn.ModuleList([block(1, 8), block(8, 16), block(16, 16)])
        self.up, self.out = nn.ModuleList([block(32, 8), block(16, 8)]), nn.Conv3d(8, 3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a = self.down[0](x)
        b = self.down[1](F.max_pool3d(a, 2))
        h = self.down[2](F.max_pool3d(b, 2))
        for skip, up in zip((b, a), self.up, strict=True):
            h = up(torch.cat([F.interpolate(h, scale_factor=2, mode="trilinear", align_corners=True), skip], 1))
        p = self.out(h).softmax(1)
        hot = F.one_hot(y, 3).permute(0, 4, 1, 2, 3).type_as(p)
        return 1 - ((2 * (p * hot).sum((2, 3, 4)) + 1) / (p.sum((2, 3, 4)) + hot.sum((2, 3, 4)) + 1)).mean()


class Raft(nn.Module):
    """Teed and Deng (2020): all pairs' products, a pyramid looked up by `grid_sample`, a convolutional GRU."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.InstanceNorm2d(16), nn.ReLU(), nn.Conv2d(16, width, 1))
        self.context = nn.Conv2d(3, 16, 4, 4)
        self.z, self.r, self.q = (nn.Conv2d(8 + 8 + 20, 8, 3, padding=1) for _ in range(3))
        self.flow = nn.Conv2d(8, 2, 3, padding=1)
        self.mask = nn.Conv2d(8, 9 * 4, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        f1, f2 = torch.split(self.features(torch.cat([a, b], 0)), a.shape[0], 0)
        n, d, h, w = f1.shape
        corr = torch.matmul(f1.view(n, d, h * w).transpose(1, 2), f2.view(n, d, h * w)) / d**0.5
        corr = corr.view(n * h * w, 1, h, w)
        pyramid = [corr, F.avg_pool2d(corr, 2, stride=2)]
        net, inp = self.context(a).split([8, 8], dim=1)
        net, inp = torch.tanh(net), torch.relu(inp)
        rows = torch.meshgrid(torch.arange(h, device=a.device), torch.arange(w, device=a.device), indexing="ij")
        base = torch.stack(rows[::-1], 0).type_as(a)[None].repeat(n, 1, 1, 1)
        coords, offsets = base, torch.tensor([[-1, 0], [1, 0], [0, 0], [0, 1], [0, -1]], device=a.device).type_as(a)
        for _ in range(2):
            coords, seen = coords.detach(), []
            for i, level in enumerate(pyramid):
                center = coords.permute(0, 2, 3, 1).reshape(n * h * w, 1, 1, 2) / 2**i + offsets.view(1, 5, 1, 2)
                x, y = center.split([1, 1], dim=-1)
                grid = torch.cat([2 * x / (level.shape[-1] - 1) - 1, 2 * y / (level.shape[-2] - 1) - 1], -1)
                seen.append(F.grid_sample(level, grid, align_corners=True).view(n, h, w, -1))
            motion = torch.cat(seen, -1).permute(0, 3, 1, 2)
            x = torch.cat([inp, motion, motion], 1)
            z, r = (torch.sigmoid(m(torch.cat([net, x], 1))) for m in (self.z, self.r))
            net = (1 - z) * net + z * torch.tanh(self.q(torch.cat([r * net, x], 1)))
            coords = coords + self.flow(net)
        flow = coords - base
        mask = torch.softmax(self.mask(net).view(n, 1, 9, 2, 2, h, w), dim=2)
        up = F.unfold(2 * flow, [3, 3], padding=1).view(n, 2, 9, 1, 1, h, w)
        return torch.sum(mask * up, dim=2).permute(0, 1, 4, 2, 5, 3).reshape(n, 2, 2 * h, 2 * w)


def _x(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def _ids(most: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, most, shape)


PAPERS: dict[str, tuple[type[nn.Module], tuple[Callable[[], Any], ...]]] = {
    "FNO": (Fno, (_x(2, 10, 10, 1),)),
    "DeepONet": (DeepONet, (_x(3, 20), _x(7, 2))),
    "SIREN": (Siren, (_x(8, 2),)),
    "PINN": (Pinn, (_x(8, 1), _x(8, 1))),
    "neural ODE": (NeuralOde, (_x(5, 6),)),
    "KAN": (Kan, (lambda: torch.rand(6, 4) * 2 - 1,)),
    "S4D": (S4d, (_x(2, 16, 12),)),
    "Mamba by steps": (SelectiveScan, (_x(2, 6, 16),)),
    "EGNN": (Egnn, (_x(8, 16), _x(8, 3), _ids(8, 2, 20))),
    "Glow": (Glow, (_x(2, 3, 8, 8),)),
    "NICE": (Nice, (_x(4, 16),)),
    "mixture density network": (MixtureDensity, (_x(6, 5), _x(6, 3))),
    "VQ-VAE": (VqVae, (_x(2, 3, 8, 8),)),
    "VQ by running means": (VqEma, (_x(10, 12),)),
    "energy-based model": (Energy, (_x(6, 6), _x(6, 6))),
    "score matching": (ScoreMatching, (_x(6, 6), lambda: torch.rand(6), _x(6, 6))),
    "Set Transformer": (SetTransformer, (_x(3, 8, 3),)),
    "PointNet++": (PointNet2, (_x(2, 20, 3),)),
    "DGCNN": (Dgcnn, (_x(3, 3, 12),)),
    "slot attention": (SlotAttention, (_x(2, 9, 16), _x(2, 3, 16))),
    "neural Turing machine": (Ntm, (_x(3, 4, 4),)),
    "Hopfield network": (Hopfield, (_x(4, 12),)),
    "capsules": (Capsules, (_x(3, 1, 14, 14), _ids(4, 3))),
    "Perceiver IO": (PerceiverIo, (_x(2, 10, 12),)),
    "hypernetwork": (HyperNetwork, (_x(3, 3, 8, 8), _x(3, 10))),
    "ConvLSTM": (ConvLstm, (_x(2, 3, 3, 6, 6),)),
    "Tacotron": (Tacotron, (_ids(30, 2, 7), _x(2, 3, 8))),
    "pointer network": (Pointer, (_x(3, 5, 2),)),
    "BiLSTM-CRF": (Crf, (_ids(30, 3, 6), _ids(5, 3, 6), lambda: torch.arange(6) < torch.tensor([[6], [4], [5]]))),
    "TreeLSTM": (TreeLstm, (_x(3, 8, 12),)),
    "GRU-D": (GruD, (_x(3, 5, 6), lambda: (torch.rand(3, 5, 6) > 0.3).double(), lambda: torch.rand(3, 5, 6))),
    "RNN transducer": (Transducer, (_x(2, 4, 8), lambda: torch.randint(1, 10, (2, 3)))),
    "characters and highways": (Highway, (_ids(30, 2, 5, 6),)),
    "modded nanoGPT": (Speedrun, (_ids(64, 2, 8), _ids(64, 2, 8))),
    "sorted tokens' experts": (TokenExperts, (_x(2, 6, 16),)),
    "SASRec": (SasRec, (_ids(51, 3, 8), _ids(51, 3, 8), _ids(51, 3, 8))),
    "BERT4Rec": (Bert4Rec, (lambda: torch.randint(1, 50, (3, 8)), _ids(8, 3, 2))),
    "AutoInt": (AutoInt, (_ids(10, 5, 3),)),
    "DCN-v2": (DcnV2, (_x(6, 16),)),
    "FT-Transformer": (FtTransformer, (_x(4, 5), _ids(10, 4, 3))),
    "NODE": (Trees, (_x(5, 8),)),
    "DIN": (DeepInterest, (_ids(60, 5), _ids(60, 5, 6))),
    "N-BEATS": (NBeats, (_x(5, 12),)),
    "TFT": (Tft, (_x(3, 6, 4),)),
    "3D U-Net": (UNet3d, (_x(2, 1, 8, 8, 8), _ids(3, 2, 8, 8, 8))),
    "RAFT": (Raft, (_x(2, 3, 24, 24), _x(2, 3, 24, 24))),
}
"""Name -> the class, and what makes the arguments of a call."""
