"""The flow models under the contract of every model: likelihood, sampling, latents, initialisation, monitor."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, NotFinite
from genmodels.core.random import KeyedGenerator
from genmodels.evaluation.materials import interpolate
from genmodels.flows.bijection import NotInitialized
from genmodels.flows.coupling_flows import TokenNet
from genmodels.flows.elementwise import Affine
from genmodels.flows.replay import DriftGauge
from genmodels.models import flow
from genmodels.models.ddpm import DDPM
from genmodels.models.masked_diffusion import MaskedDiffusionModel
from genmodels.models.normalizing_flows import MAF, NSF, Glow, Jet, RealNVP, TarFlow
from tests.parameters import scattered_model

DIGITS = DataSpec("digits", (1, 8, 8), levels=17, num_classes=10)
COLOURS = DataSpec("colours", (3, 8, 8), levels=256)
PLANE = DataSpec("plane", (2,))
TABLE = DataSpec("table", (5,))
COUNTS = DataSpec("counts", (4,), levels=8)
TRACKS = DataSpec("tracks", (4, 16), levels=16)

SMALL = {"width": 16, "depth": 1, "heads": 2}
TINY = {"_target_": "genmodels.nn.dit.DiT", "width": 8, "depth": 1, "heads": 2, "patch": 2}
MODELS = {
    "glow": lambda: Glow(DIGITS, steps=2, hidden=8),
    "glow centred, sigmoid, diagonal": lambda: Glow(COLOURS, steps=1, hidden=8, preprocess="centre", scale="sigmoid",
                                                    base="diagonal"),
    "glow of classes": lambda: Glow(DIGITS, steps=1, hidden=8, class_conditional=True, base="class"),
    "glow of sequences": lambda: Glow(TRACKS, steps=1, hidden=8, levels=2),
    "glow, mixtures": lambda: Glow(DIGITS, steps=1, hidden=8, coupling="mixture"),
    "glow, splines": lambda: Glow(DIGITS, steps=1, hidden=8, coupling="spline"),
    "glow, variational": lambda: Glow(DIGITS, steps=1, hidden=8, dequantisation="variational"),
    "realnvp": lambda: RealNVP(DIGITS, layout=["checkerboard*2", "squeeze", "channel*2"], hidden=8, depth=1),
    "realnvp, gated, two scales": lambda: RealNVP(
        DIGITS, layout=["checkerboard*2", "squeeze", "channel*2", "split", "squeeze", "channel*2"], hidden=[4, 6, 8],
        depth=1, net="gated", scale="tied", actnorm=False, dequantisation="variational", alpha=1e-5),
    "realnvp of vectors": lambda: RealNVP(TABLE, hidden=16),
    "realnvp of counts": lambda: RealNVP(COUNTS, hidden=16, dequantisation="variational"),
    "nsf": lambda: NSF(PLANE, layers=3, bins=4),
    "nsf, autoregressive": lambda: NSF(TABLE, layers=2, bins=4, kind="autoregressive"),
    "nsf, linear maps": lambda: NSF(TABLE, layers=2, bins=4, mix="lu", residual=True),
    "nsf of one column": lambda: NSF(DataSpec("line", (1,)), layers=2, bins=4, kind="autoregressive"),
    "nsf of images": lambda: NSF(DIGITS, layers=2, bins=4, mix="lu"),
    "maf of images": lambda: MAF(COLOURS, layers=1, hidden=8),
    "tarflow": lambda: TarFlow(DIGITS, blocks=2, **SMALL),
    "tarflow of classes": lambda: TarFlow(DIGITS, blocks=2, class_conditional=True, **SMALL),
    "tarflow of sequences": lambda: TarFlow(TRACKS, blocks=2, patch=2, **SMALL),
    "jet": lambda: Jet(DIGITS, couplings=3, memory="inverse", **SMALL),
    "tarflow, whitened": lambda: TarFlow(COLOURS, blocks=2, whiten=2, preprocess="centre", **SMALL),
    "glow, whitened": lambda: Glow(COLOURS, steps=1, hidden=8, whiten=1),
    "glow of sequences, whitened": lambda: Glow(TRACKS, steps=1, hidden=8, levels=2, whiten=1),
    "nsf of images, whitened": lambda: NSF(COLOURS, layers=2, bins=4, whiten=2),
    "maf, whitened": lambda: MAF(PLANE, layers=2, whiten=1),
    "jet, two scales": lambda: Jet(COLOURS, couplings=2, levels=2, **SMALL),
    "maf": lambda: NSF(TABLE, layers=2, kind="autoregressive", transform="affine", mix="actnorm"),
}


def batch_of(spec: DataSpec, n: int = 24) -> Batch:
    generator = torch.Generator().manual_seed(0)
    if spec.levels is None:
        x = torch.randn(n, *spec.event_shape, generator=generator) * 3 + 1
    else:
        x = torch.randint(0, spec.levels, (n, *spec.event_shape), generator=generator).to(torch.uint8)
    labels = torch.arange(n) % spec.num_classes if spec.num_classes else None
    return Batch(x, labels, index=torch.arange(n))


def made(name: str, initialised: bool = True):
    torch.manual_seed(0)
    model = MODELS[name]()
    if initialised:
        model.initialize(batch_of(model.spec))
        scattered_model(model, 0.05, seed=1)  # away from the identity that couplings start as
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_trains_judges_and_samples(name):
    model = made(name)
    batch = batch_of(model.spec)
    loss = model.loss(batch, KeyedGenerator(0, batch.index, "train"))
    loss.value.backward()
    assert loss.per_example.shape == (24,) and torch.isfinite(loss.value)
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.core.parameters())
    likelihood = model.log_likelihood(batch)
    assert likelihood.kind == ("exact" if model.spec.levels is None else "lower_bound")
    assert len(likelihood) == 24 and not len(likelihood.nonfinite)
    samples = model.sample(3, temperature=0.5)
    assert samples.x.shape == (3, *model.spec.event_shape)
    if model.spec.levels is not None:
        assert samples.x.dtype == torch.uint8 and int(samples.x.max()) < model.spec.levels


@pytest.mark.parametrize("name", MODELS)
def test_samples_have_addresses(name):
    model = made(name).double()
    whole = model.sample(5, seed=3).x.double()
    alone = model.sample(1, seed=3, start=3, **({"cond": 3} if model.num_classes else {})).x.double()
    torch.testing.assert_close(alone[0], whole[3], rtol=1e-6, atol=1e-6)
    assert not torch.equal(model.sample(5, seed=4).x, whole)


@pytest.mark.parametrize("name", MODELS)
def test_latents_hold_everything(name):
    model = made(name).double()
    batch = batch_of(model.spec, 4)
    latents = model.latents(batch)
    assert sum(scale[0].numel() for scale in latents.scales) == model.spec.dims
    back = model.from_latents(latents, batch.cond if model.num_classes else None)
    torch.testing.assert_close(back.double(), batch.x.double(), rtol=1e-6, atol=1e-6)


def test_mels_of_latents_are_silent_beyond_their_length():
    spec = DataSpec("mels", (4, 16), mel={}, statistics={"mean": -5.0, "std": 2.0, "frames": 8})
    mask = torch.arange(16) < torch.tensor([8, 16])[:, None, None]
    data = Batch(torch.randn(2, 4, 16).masked_fill(~mask, math.log(1e-5)), mask=mask)
    model = Glow(spec, steps=1, hidden=8, levels=1)
    model.initialize(data)
    back = model.eval().from_latents(model.latents(data), mask=mask)
    torch.testing.assert_close(back, data.x, rtol=1e-4, atol=1e-4)


def test_importance_samples_are_for_integers():
    with pytest.raises(InputError, match="importance_samples=2 is for integers, and plane has real numbers"):
        made("nsf").log_likelihood(batch_of(PLANE), importance_samples=2)


@pytest.mark.parametrize("name", ["nsf", "maf", "realnvp of vectors"])
def test_the_density_is_that_of_the_data(name):
    """log p(x) = log N(z) + log |det dz/dx| in the data's own units, by autograd through everything."""
    model = made(name).double()
    x = batch_of(model.spec, 3).x.double()
    claimed = model.log_likelihood(Batch(x)).nats
    flow = model.weights().flow
    for k in range(3):
        jacobian = torch.autograd.functional.jacobian(lambda row: flow.bijection(row[None])[0][0], x[k])
        z = flow.bijection(x[k : k + 1])[0][0]
        truth = -0.5 * (z.square().sum() + len(z) * math.log(2 * math.pi)) + torch.linalg.slogdet(jacobian)[1]
        assert abs(float(claimed[k] - truth)) < 1e-9


def test_more_importance_samples_raise_the_bound():
    model = made("glow")
    batch = batch_of(DIGITS)
    one, many = (model.log_likelihood(batch, importance_samples=k) for k in (1, 16))
    assert one.stderr is None and many.stderr.shape == (24,)
    assert float((many.nats - one.nats).mean()) > 0
    assert many.made["importance_samples"] == 16


@pytest.mark.parametrize("make", [
    lambda: TarFlow(DIGITS, class_conditional=True, blocks=2, **SMALL),
    lambda: DDPM(DIGITS, num_steps=4, net=TINY),
    lambda: MaskedDiffusionModel(DIGITS, net=TINY),
])
def test_a_likelihood_says_whether_the_class_was_given(make):
    model, (x, cond) = make().eval(), (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1]))
    model.initialize(Batch(torch.arange(17).repeat(2, 64)[:, :64].view(2, 1, 8, 8).to(torch.uint8), cond))
    of_class, of_none = (model.log_likelihood(batch, weights="raw").made for batch in (Batch(x, cond), Batch(x)))
    assert of_class["given"] == "class" and "given" not in of_none


def test_masked_integers_have_their_loss_in_bits():
    torch.manual_seed(0)
    model = TarFlow(TRACKS, blocks=2, ema_decay=0, **SMALL)
    x = torch.randint(0, 16, (8, 4, 16)).to(torch.uint8)
    model.initialize(Batch(x))
    whole, masked = Batch(x), Batch(x, mask=torch.ones(8, 1, 16, dtype=torch.bool))
    losses = [model.loss(batch, KeyedGenerator(0, torch.arange(8), "train")).value.item() for batch in (whole, masked)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("there, here", [("store", "inverse"), ("inverse", "store"), ("inverse", "inverse")])
def test_weights_are_taken_over_whatever_the_memory(there, here):
    first, second = (Glow(DIGITS, steps=1, hidden=8, memory=memory, ema_decay=0) for memory in (there, here))
    first.initialize(Batch(torch.randint(0, 17, (9, 1, 8, 8))))
    gauges = [part for part in first.core.modules() if isinstance(part, DriftGauge)]
    for gauge in gauges:
        gauge.switch([0])
    assert bool(gauges) == (there == "inverse")
    second.start_from(first)
    x = torch.randint(0, 17, (3, 1, 8, 8), dtype=torch.uint8)
    found = [model.eval().log_likelihood(Batch(x)).nats for model in (first, second)]
    assert torch.equal(*found)
    assert not any(any(part.stores) for part in second.core.modules() if isinstance(part, DriftGauge))


def test_the_class_counts_where_it_is_a_condition():
    model = made("glow of classes")
    batch = batch_of(DIGITS)
    other = Batch(batch.x, (batch.cond + 1) % 10, index=batch.index)
    assert not torch.equal(model.log_likelihood(batch).nats, model.log_likelihood(other).nats)
    assert model.log_likelihood(batch).made["given"] == "class"
    assert model.sample(4, cond=[3, 5]).cond.tolist() == [3, 5, 3, 5]


@pytest.mark.parametrize("call", ["log_likelihood", "sample"])
def test_before_initialisation_is_an_error_that_says_what_to_do(call):
    model = made("glow", initialised=False)
    with pytest.raises(NotInitialized, match="ActNorm.*initialize"):
        model.sample(1) if call == "sample" else model.log_likelihood(batch_of(DIGITS))


def test_initialisation_takes_finite_values_alone():
    model = MAF(PLANE, layers=2, whiten=1)
    x = torch.randn(64, 2)
    x[3, 1] = math.nan
    with pytest.raises(NotFinite, match="row 3 is not finite"):
        model.initialize(Batch(x, index=torch.arange(64)))


def test_loading_never_initialises_again():
    model = made("glow")
    twin = made("glow", initialised=False)
    twin.load_state_dict(model.state_dict())
    batch = batch_of(DIGITS)
    assert torch.equal(twin.log_likelihood(batch).nats, model.log_likelihood(batch).nats)
    twin.train()
    twin.loss(batch, KeyedGenerator(0, batch.index))
    assert all(torch.equal(a, b) for a, b in zip(twin.state_dict().values(), model.state_dict().values(), strict=True))


def test_interpolation_begins_and_ends_at_the_items():
    model = made("glow").double()
    ends = batch_of(DIGITS, 2)
    between = interpolate(model, Batch(ends.x), 5)
    assert torch.equal(between[0], ends.x[0]) and torch.equal(between[-1], ends.x[1])
    assert not torch.equal(between[2], ends.x[0])


def test_the_monitor_names_the_layer_that_loses():
    """Mutant: one coupling whose scale leaves no room for what it multiplies in float32."""
    model = made("realnvp of vectors")
    batch = batch_of(TABLE)
    assert model.examine(batch).first_drifting() is None
    coupling = model.core.flow.bijection.layers[1].layers[3]
    assert isinstance(coupling.transform, Affine)

    class Crushing(torch.nn.Module):
        params_per_dim = 2

        def forward(self, x, params):
            return x * 1e-30 + params[:, 1], torch.full_like(x, math.log(1e-30))

        def inverse(self, z, params):
            return (z - params[:, 1]) * 1e30, torch.full_like(z, -math.log(1e-30))

    coupling.transform = Crushing()
    health = model.examine(batch)
    assert health.first_drifting().name == "layers.1.layers.3"
    assert health.figures()["log_scale"] > 60


def test_options_that_do_not_fit_are_refused():
    for build, message in (
        (lambda: Glow(PLANE), "images"),
        (lambda: Glow(DataSpec("odd", (1, 7, 7), levels=2)), "even"),
        (lambda: NSF(TRACKS), "nsf takes vectors and images"),
        (lambda: Glow(TRACKS, noise=float("nan")), "noise must be a finite number from 0"),
        (lambda: RealNVP(TRACKS), "glow"),
        (lambda: RealNVP(DIGITS, layout=["chequered*2"]), "chequered"),
        (lambda: RealNVP(DIGITS, layout=["checkerboard*1", "split"]), "split needs an even .* put squeeze before it"),
        (lambda: RealNVP(DIGITS, layout=["channel*1"]), r"channel\*1 needs at least two channels, the image has 1"),
        (lambda: RealNVP(DIGITS, hidden=[8]), "groups"),
        (lambda: Glow(DIGITS, base="class"), "class_conditional"),
        (lambda: NSF(DataSpec("line", (1,))), "2 dimensions.*kind=autoregressive"),
        (lambda: RealNVP(DataSpec("line", (1,))), "model.kind=autoregressive"),
        (lambda: Glow(DataSpec("odd", (1, 7, 5), levels=2)), r"model=realnvp model.layout=\[checkerboard\*4\]"),
        (lambda: RealNVP(DataSpec("odd", (1, 7, 5), levels=2)), "model.layout"),
        (lambda: NSF(PLANE, class_conditional=True), "needs labels, and plane has none"),
        (lambda: NSF(COUNTS, dequantisation="none"), "dequantisation must be one of uniform, level, variational"),
        (lambda: NSF(COUNTS, preprocess="none"), "preprocess must be one of logit, centre"),
        (lambda: NSF(COUNTS, base="uniform"), "base must be one of normal, diagonal, class"),
        (lambda: RealNVP(TABLE, hidden=0), "hidden = 0"),
        (lambda: RealNVP(DIGITS, couplings=64), "couplings=64 is for vectors, and layout= for images"),
        (lambda: RealNVP(TABLE, layout=["channel*2"]), "layout=.* is for images: leave it out"),
        (lambda: RealNVP(TABLE, net="gated"), "net=gated is for images"),
        (lambda: RealNVP(TABLE, actnorm=False), "actnorm=False is for images"),
        (lambda: RealNVP(TABLE, attention="rope2d"), "attention=rope2d is for images"),
        (lambda: NSF(TABLE, transform="affine", bins=9), "bins=9 is for transform=spline"),
        (lambda: NSF(COUNTS, preprocess="centre", alpha=0.1), "alpha=0.1 is for preprocess=logit"),
        (lambda: MAF(DataSpec("count", (1,), levels=8), dequantisation="variational"), "give dequantisation=level"),
        (lambda: MAF(TABLE, whiten=2), "whiten=2 is the side of squares of an image, and table has none: give 1"),
        (lambda: Glow(TRACKS, whiten=4), "whiten=4 is the side of squares of an image"),
        (lambda: Glow(DIGITS, whiten=3), "whiten=3 does not divide the sides of images of 8 x 8; these do: 1, 2, 4, 8"),
        (lambda: Glow(DIGITS, whiten=-1), "whiten"),
        (lambda: Glow(DIGITS, coupling="additive", scale="sigmoid"), "scale=sigmoid is for coupling=affine"),
    ):
        with pytest.raises(ValueError, match=message):
            build()


def starts_from_the_gaussian_of_squares(make):
    """Before training the density of an image is that of its squares under one Gaussian, of mean and covariance."""
    generator = torch.Generator().manual_seed(1)
    rotation = torch.linalg.qr(torch.randn(12, 12, generator=generator))[0]
    squares = torch.randn(40 * 16, 12, generator=generator) @ (rotation * torch.linspace(1, 8, 12)).T
    x = (128 + 4 * squares).round().clamp(0, 255).view(40, 4, 4, 3, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(40, 3, 8, 8)
    batch = Batch(x.to(torch.uint8), index=torch.arange(40))
    model = make(2).double()
    model.initialize(batch)
    nats = model.log_likelihood(batch, weights="raw").nats
    cut = (x.double() + 0.5).view(40, 3, 4, 2, 4, 2).permute(0, 2, 4, 1, 3, 5).reshape(40 * 16, 12)
    covariance = torch.cov(cut.T, correction=0) + torch.eye(12).double() / 12  # the noise's own variance
    gaussian = torch.distributions.MultivariateNormal(cut.mean(0), covariance)
    truth = gaussian.log_prob(cut).view(40, 16).sum(1)
    error = float((nats - truth).std()) / math.sqrt(40)  # of the draws of the noise
    assert float(nats.mean()) == pytest.approx(float(truth.mean()), abs=5 * error)


def test_whitened_squares_start_as_their_gaussian():
    def made_with(side: int) -> TarFlow:
        return TarFlow(COLOURS, blocks=2, whiten=side, preprocess="centre", **SMALL)

    starts_from_the_gaussian_of_squares(made_with)
    with pytest.raises(AssertionError):
        starts_from_the_gaussian_of_squares(lambda side: made_with(0))


def test_whitening_takes_enough_items(monkeypatch):
    """More than what else would be held at once, where the covariance needs them."""
    monkeypatch.setattr(flow, "_INITIAL_SCALARS", 192)
    batch = batch_of(COLOURS, 160)
    made = [TarFlow(COLOURS, blocks=2, whiten=side, **SMALL) for side in (4, 8)]
    made[0].initialize(batch)
    with pytest.raises(InputError, match="whiten=8 takes the covariance of 192 numbers from at least 1920 items, and "
                                         "colours has 160: give a smaller whiten, or 0"):  # fmt: skip
        made[1].initialize(batch)


@pytest.mark.parametrize("spread", [0.0, 1e-5])
def test_a_column_without_a_density_is_refused(spread):
    batch = batch_of(TABLE, 64)
    batch.x[:, 3] = 100 + spread * torch.randn(64, generator=torch.Generator().manual_seed(0))
    for model in (NSF(TABLE, layers=2), RealNVP(TABLE, hidden=8)):
        with pytest.raises(InputError, match="column 4 of table is constant"):
            model.initialize(batch)
        model.initialize(batch_of(TABLE))


@pytest.mark.parametrize("temperature", [-1.0, math.inf, math.nan, 1e30])
def test_temperatures_are_checked(temperature):
    with pytest.raises(ValueError, match="temperature must be a finite number"):
        made("nsf").sample(2, temperature=temperature)


def test_options_that_are_left_open_are_decided():
    assert Glow(DIGITS, steps=1, hidden=8).decided == {"levels": 2}
    assert RealNVP(PLANE, couplings=2).decided == {"hidden": 256, "depth": 2}


def test_the_monitor_of_several_processes_looks_at_the_items_of_one(monkeypatch):
    """Of two processes that share the items in turn each takes half of the first sixteen."""
    torch.manual_seed(0)
    model = NSF(PLANE, layers=1, hidden=8)
    whole = Batch(torch.randn(60, 2), index=torch.arange(60))
    model.initialize(whole)
    seen = []
    for rank in range(2):
        monkeypatch.setattr("genmodels.models.flow.rank_world", lambda rank=rank: (rank, 2))
        model.validation_step(whole.rows(torch.arange(rank, 60, 2)), 0)
        seen += model._probe.index.tolist()
    assert sorted(seen) == list(range(16))


@pytest.mark.parametrize("multiple, refused", [(8, False), (16, False), (None, False), (4, True), (2, True)])
def test_mels_come_in_whole_groups_of_frames(multiple, refused):
    model = Glow(TRACKS, levels=3, steps=1, hidden=8)
    data = SimpleNamespace() if multiple is None else SimpleNamespace(multiple=multiple)
    expected = pytest.raises(InputError, match=f"data.multiple={multiple}: .* give data.multiple=8")
    with expected if refused else contextlib.nullcontext():
        model.check_items(data)


def test_a_jet_of_a_former_version_is_the_same_with_places():
    before, now = (Jet(DIGITS, couplings=2, spatial=2, width=8, depth=1, heads=2, places=on) for on in (False, True))
    batch = batch_of(DIGITS)
    before.initialize(batch)
    scattered_model(before)
    now.load_state_dict({key: value for key, value in before.state_dict().items() if "places" not in key})
    assert any("places" in key for key in now.state_dict())
    found = [model.eval().log_likelihood(batch, weights="raw").nats for model in (before, now)]
    assert torch.equal(*found)


def test_the_networks_of_a_jet_know_where_a_token_is():
    """Of equal patches, which relative positions cannot tell apart."""
    for places, told in ((True, True), (False, False)):
        net = TokenNet(3, 6, width=8, depth=1, heads=2, space=(4, 5), places=places)
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        y = net(torch.ones(1, 3, 4, 5))
        assert bool((y - y[..., :1, :1]).abs().max() > 1e-2) is told
