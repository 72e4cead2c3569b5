"""What samples draw in a worker process of ours, where the drawing functions are replaced.

The replacements are for good, so each test makes them in a process of its own.
"""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import pickle
import random
import sys
import threading
import traceback
from functools import partial
from random import gauss as early_gauss
from random import random as early_random
from random import seed as early_seed
from types import ModuleType

import numpy as np
import pytest
import torch
import torchvision
from numpy.random import rand as early_rand
from torch import nn
from torch import randperm as early_randperm
from torch.nn import functional as F  # noqa: N812 (as in torch's docs)
from torchvision import transforms as v1
from torchvision.transforms import v2

from spdl_torch import sample_rng
from spdl_torch._random import (
    KeyCursor,
    SampleRngMode,
    redirect_draws,
    restart_sample,
    sample_context,
)

from .conftest import assert_says_nothing
from .test_randomness import DISTRIBUTIONS, FUNCTIONS, WITHOUT_GENERATOR, half, sampled_by
from .test_torchvision_draws import DRAWING, Transformed

KEYS = [(5, key) for key in range(6)]
PATIENCE_SECONDS = 60


def in_child(function, *args, before=redirect_draws):
    """Return what a function returns in a forked process in which draws are redirected."""

    def run():
        try:
            torch.set_num_threads(1)
            before()
            sender.send((function(*args), None))
        except BaseException:
            sender.send((None, traceback.format_exc()))

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=run)
    child.start()
    try:
        assert receiver.poll(PATIENCE_SECONDS), "the child hangs"
        result, error = receiver.recv()
    finally:
        child.kill()
        child.join()
    assert error is None, error
    return result


def plain(value):
    """Return what was drawn as something that can be compared."""
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value


def drawn(draw, keys=KEYS):
    """Return what a function draws in the sample of each key."""
    cursor, values = KeyCursor(), []
    context = sample_context(cursor)
    for key in keys:
        cursor.move(key)
        with context:
            values.append(plain(draw()))
    return values


def all_drawn(draws, **options):
    return {name: drawn(draw, **options) for name, draw in draws.items()}


def states():
    """Return the states of the generators of the process."""
    return random.getstate(), plain(np.random.get_state()), plain(torch.get_rng_state())


# -- torch ----------------------------------------------------------------------------------------

TORCH = {
    **FUNCTIONS,
    **{name: sampled_by(make) for name, make in DISTRIBUTIONS.items()},
    "by name": lambda: torch.bernoulli(input=half()),
    "on the CPU": lambda: torch.rand(3, device="cpu"),
    "of another device": lambda: torch.rand(3, device="meta").shape,
    "several": lambda: (torch.rand(2), torch.randperm(9), half().normal_()),
}


@pytest.mark.filterwarnings("ignore:Singular sample")
def test_torch_functions_draw_identical_bits():
    """What draws through torch draws the same as in a thread, and nothing from the process."""

    def draw():
        before = states()
        values = all_drawn(TORCH)
        assert states() == before
        assert type(sample_context(KeyCursor())) is not SampleRngMode
        return values

    assert type(sample_context(KeyCursor())) is SampleRngMode
    expected = all_drawn(TORCH)
    # No sample draws what another draws, except for the few that draw few bits.
    assert sum(len(set(map(str, values))) == len(KEYS) for values in expected.values()) > 60
    assert in_child(draw) == expected


@pytest.mark.parametrize("module", [v1, v2], ids=["v1", "v2"])
@pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")
def test_transforms_draw_identical_bits(module):
    """Every transform of torchvision draws the same as in a thread, `RandomChoice` too."""
    draws = {
        name: partial(Transformed(getattr(module, name)(**arguments)).__getitem__, 0)
        for name, arguments in DRAWING[module].items()
    }
    assert in_child(all_drawn, draws) == all_drawn(draws)


def dropouts():
    tensor = 1 + torch.arange(48.0).reshape(2, 4, 3, 2)
    draws = {
        "functional.dropout": partial(F.dropout, tensor, 0.4),
        "functional.dropout1d": partial(F.dropout1d, tensor[0], 0.4),
        "functional.dropout2d": partial(F.dropout2d, tensor, 0.4),
        "functional.dropout3d": partial(F.dropout3d, tensor[..., None], 0.4),
        "functional.alpha_dropout": partial(F.alpha_dropout, tensor, 0.4),
        "functional.feature_alpha_dropout": partial(F.feature_alpha_dropout, tensor, 0.4),
    }
    for kind in ("", "alpha_", "feature_", "feature_alpha_"):
        for name in (f"{kind}dropout", f"{kind}dropout_"):
            draws[f"torch.{name}"] = lambda name=name: getattr(torch, name)(tensor + 0, 0.4, True)
    return draws | {
        "module": lambda: nn.Dropout(0.3)(tensor),
        "all dropped": lambda: F.dropout(tensor, 1.0),
        "nothing dropped": lambda: F.dropout(tensor, 0.0),
        "evaluation": lambda: F.dropout(tensor, 0.5, training=False),
        "no features": lambda: torch.feature_dropout(tensor[:, 0, 0], 0.5, True),
        "channels last": lambda: F.dropout(tensor.to(memory_format=torch.channels_last), 0.5),
        "gradient": lambda: torch.autograd.functional.vjp(F.alpha_dropout, tensor, tensor)[1],
    }


def test_dropout_draws_what_torch_draws():
    """Dropout in a sample drops what torch's own drops from a generator with the same seed."""

    def seeded(draw):
        torch.manual_seed(3)
        return draw()

    def draw():
        before = states()
        values = {name: drawn(partial(seeded, draw), KEYS[:1])[0] for name, draw in DROPOUTS}
        assert states() == before
        return values

    DROPOUTS = dropouts().items()  # noqa: N806
    with torch.random.fork_rng():
        expected = {name: plain(seeded(draw)) for name, draw in DROPOUTS}
    assert in_child(draw) == expected


def attended(tensor):
    return nn.MultiheadAttention(4, 2, dropout=0.5)(tensor, tensor, tensor)[0].detach()


WITH_NO_GENERATOR = {
    "functional.fractional_max_pool2d_with_indices": lambda: F.fractional_max_pool2d(
        torch.arange(81.0).reshape(1, 9, 9), 2, output_size=3
    ),
    "functional.fractional_max_pool3d_with_indices": lambda: F.fractional_max_pool3d(
        torch.arange(729.0).reshape(1, 9, 9, 9), 2, output_size=3
    ),
    "functional.gumbel_softmax": lambda: F.gumbel_softmax(torch.ones(9)),
    "functional.multi_head_attention_forward": lambda: attended(torch.ones(5, 4)),
    "functional.rrelu": lambda: F.rrelu(-half(), training=True),
}
"""Functions that cannot be given a generator, and that call others that can."""

DRAWN_IN_CPP = {  # The docs name them among what is not covered.
    "functional.scaled_dot_product_attention",
    "torch.gru",
    "torch.lstm",
    "torch.miopen_rnn",
    "torch.native_dropout",
    "torch.rnn_relu",
    "torch.rnn_tanh",
}


def test_every_function_without_generator_is_known():
    """Of the functions that take no generator, models alone use those that are not covered."""
    covered = WITH_NO_GENERATOR.keys() | dropouts().keys()
    assert covered & WITHOUT_GENERATOR == WITHOUT_GENERATOR - DRAWN_IN_CPP


def test_functions_without_generator_follow_samples():
    """Functions that cannot be given a generator draw from the sample too."""

    def draw():
        before = states()
        values = all_drawn(WITH_NO_GENERATOR)
        assert states() == before
        return values, all_drawn(WITH_NO_GENERATOR)

    values, again = in_child(draw)
    assert values == again
    assert all(len(set(map(str, of_samples))) > 1 for of_samples in values.values())


@pytest.mark.parametrize("before", [redirect_draws, lambda: None], ids=["child", "thread"])
def test_given_generators_are_used(before):
    """A generator that is given by position or by name is used, and so is a default device."""
    count = torch.full((8,), 9.0)

    def draw():
        given = torch.Generator().manual_seed(3)
        by_position = torch.binomial(count, half(8), given), torch.poisson(count, given)
        with torch.device("meta"):
            device = torch.rand(3).device.type
        return (
            *by_position,
            torch.rand(3, generator=given),
            half(8).normal_(generator=given),
            device,
        )

    first, *others = in_child(drawn, draw, before=before)
    assert first == plain(draw())
    assert others == [first] * len(others)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_scripts_compile_in_the_child():
    """TorchScript still knows the functions that are replaced."""

    def noise(tensor: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.rand(3) + tensor.uniform_())

    torch.jit.script(noise)  # Makes the table of functions that the child inherits.

    def shape():
        def other(tensor: torch.Tensor) -> torch.Tensor:
            return F.dropout(torch.rand(3) + tensor.uniform_())

        return tuple(torch.jit.script(other)(torch.ones(3)).shape)

    assert in_child(shape) == (3,)


# -- `random` and `numpy.random` ------------------------------------------------------------------

RANDOM = {
    "betavariate": (1, 2),
    "binomialvariate": (9, 0.5),
    "choice": (range(1000),),
    "choices": (range(1000),),
    "expovariate": (1.0,),
    "gammavariate": (1, 2),
    "gauss": (0, 1),
    "getrandbits": (40,),
    "lognormvariate": (0, 1),
    "normalvariate": (0, 1),
    "paretovariate": (1,),
    "randbytes": (4,),
    "randint": (0, 1000),
    "random": (),
    "randrange": (1000,),
    "sample": (range(1000), 3),
    "shuffle": None,
    "triangular": (),
    "uniform": (0, 1),
    "vonmisesvariate": (0, 1),
    "weibullvariate": (1, 1),
}
NUMPY = {
    "beta": (1, 2),
    "binomial": (1000, 0.5),
    "bytes": (4,),
    "chisquare": (2,),
    "choice": (1000,),
    "dirichlet": ([1, 2],),
    "exponential": (),
    "f": (1, 2),
    "gamma": (2,),
    "geometric": (0.01,),
    "gumbel": (),
    "hypergeometric": (1000, 1000, 500),
    "laplace": (),
    "logistic": (),
    "lognormal": (),
    "logseries": (0.99,),
    "multinomial": (1000, [0.5, 0.5]),
    "multivariate_normal": ([0, 0], [[1, 0], [0, 1]]),
    "negative_binomial": (100, 0.1),
    "noncentral_chisquare": (1, 2),
    "noncentral_f": (1, 2, 3),
    "normal": (),
    "pareto": (1,),
    "permutation": (100,),
    "poisson": (1000,),
    "power": (1,),
    "rand": (),
    "randint": (1000,),
    "randn": (),
    "random": (),
    "random_integers": (1000,),
    "random_sample": (),
    "ranf": (),
    "rayleigh": (),
    "sample": (),
    "shuffle": None,
    "standard_cauchy": (),
    "standard_exponential": (),
    "standard_gamma": (2,),
    "standard_normal": (),
    "standard_t": (2,),
    "triangular": (0, 1, 2),
    "uniform": (),
    "vonmises": (0, 1),
    "wald": (1, 1),
    "weibull": (1,),
    "zipf": (1.1,),
}
DRAWING_NOTHING = {
    random: {"getstate", "seed", "setstate"},
    np.random: {"default_rng", "get_bit_generator", "get_state", "seed", "set_bit_generator"}
    | {"set_state", "test"},
}


def shuffled(module):
    numbers = list(range(100))
    module.shuffle(numbers)
    return numbers


def draws_of(module, table):
    """Return functions that draw, and that look a function of a module up as users do."""
    return {
        name: partial(shuffled, module)
        if arguments is None
        else lambda name=name, arguments=arguments: getattr(module, name)(*arguments)
        for name, arguments in table.items()
        if hasattr(module, name)
    }


MODULES = [pytest.param(random, RANDOM, id="random"), pytest.param(np.random, NUMPY, id="numpy")]


@pytest.mark.parametrize(("module", "table"), MODULES)
def test_every_function_is_known(module, table):
    """Every public function of `random` and of `numpy.random` is drawn from below."""
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and not inspect.isclass(value)
    }
    assert public - DRAWING_NOTHING[module] == draws_of(module, table).keys()


@pytest.mark.parametrize(("module", "table"), MODULES)
@pytest.mark.filterwarnings("ignore:This function is deprecated:DeprecationWarning")
def test_module_functions_draw_by_key(module, table):
    """A sample draws by its key, in any order of samples, and nothing from the process."""

    def draw():
        before = states()
        forward = all_drawn(draws_of(module, table))
        backward = all_drawn(draws_of(module, table), keys=KEYS[::-1])
        assert states() == before
        return forward, {name: values[::-1] for name, values in backward.items()}

    forward, backward = in_child(draw)
    assert forward == backward
    assert [name for name, values in forward.items() if len(set(map(str, values))) < 3] == []


def draw_from_all():
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.standard_normal(),
        torch.rand(()).item(),
        random.randrange(1 << 40),
        sample_rng().random.random(),
        sample_rng().numpy.random(),
    ]


def test_modules_draw_different_numbers():
    """What a sample draws from one generator is not what it draws from another."""
    (values,) = in_child(drawn, draw_from_all, KEYS[:1])
    with_same_seed = [values[0], values[2], values[4], *values[6:]]
    assert len(set(with_same_seed)) == len(with_same_seed)


def test_sample_rng_ignores_the_modules():
    """`sample_rng()` draws the same, whether the code draws from the modules too or not."""

    def draw():
        numbers = []
        for _ in range(3):
            random.seed(3)
            np.random.seed(3)
            numbers += sample_rng().random.random(), sample_rng().numpy.random()
            random.gauss(0, 1)
            np.random.rand()
        return numbers

    with torch.random.fork_rng():
        python_state, numpy_state = random.getstate(), np.random.get_state()
        expected = drawn(draw)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
    assert in_child(drawn, draw) == expected


def test_concurrent_samples_draw_as_alone():
    """Threads at different samples, which draw in turns, draw what each draws alone."""
    steps = 10

    def together():
        barrier = threading.Barrier(len(KEYS), timeout=PATIENCE_SECONDS)
        values = {}

        def work(key):
            def draw():
                numbers = []
                for _ in range(steps):
                    barrier.wait()
                    numbers += draw_from_all()
                return numbers

            values[key] = drawn(draw, [key])[0]

        threads = [threading.Thread(target=work, args=[key]) for key in KEYS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [values[key] for key in KEYS]

    def alone():
        return drawn(lambda: [number for _ in range(steps) for number in draw_from_all()])

    expected = in_child(alone)
    assert len({number for numbers in expected for number in numbers}) == len(KEYS) * steps * 8
    assert in_child(together) == expected


def test_samples_start_without_kept_numbers():
    """The second number that `gauss()` draws and keeps stays in its sample."""

    def draw():
        random.gauss(0, 1)  # Keeps a number.
        kept = HELD["gauss"](0, 1)
        np.random.randn()
        return kept, random.gauss(0, 1)  # Keeps another, beyond the end of the sample.

    once = [in_child(drawn, draw, [key])[0] for key in KEYS]
    assert in_child(drawn, draw) == once
    assert len(set(map(str, once))) == len(KEYS)


def test_a_retry_draws_the_same():
    """A sample that is tried again draws the same numbers from all generators."""

    def draw():
        first = draw_from_all()
        restart_sample()
        return first, draw_from_all()

    for first, second in in_child(drawn, draw):
        assert first == second


# -- functions that were imported by name ---------------------------------------------------------

HELD = {name: getattr(random, name) for name in ("gauss", "randint", "shuffle", "choice")}


def test_names_imported_early_are_found():
    """`from random import random` and the like in a module of the user draw by key."""

    def draw():
        early_seed(3)
        seeded = early_random(), random.random()
        numbers = [early_random(), early_gauss(0, 1), early_rand(), early_randperm(99).tolist()]
        numbers += [other.draw(), HELD["randint"](0, 99), HELD["choice"](range(99))]
        HELD["shuffle"](numbers)
        return *seeded, numbers, np.random.mtrand._rand.rand()

    def check():
        before = states()
        values = drawn(draw), drawn(draw)
        assert states() == before
        return values

    other = ModuleType("users_module")
    other.__file__ = "/home/user/users_module.py"
    other.draw = random.random
    sys.modules["users_module"] = other
    try:
        first, again = in_child(check)
    finally:
        del sys.modules["users_module"]
    assert first == again
    assert first[0][:2] == first[1][:2]
    assert first[0][2:] != first[1][2:]


def test_no_module_keeps_the_originals():
    """No module of torch, torchvision and numpy has a drawing function that was not replaced."""
    shared = [*vars(random).values(), *vars(np.random).values()]
    owners = random._inst, np.random.mtrand._rand
    replaced = [value for value in shared if getattr(value, "__self__", None) in owners]
    names = [name.split(".") for name in [*FUNCTIONS, *dropouts()] if "." in name]
    torchs = {"torch": torch, "functional": F, "init": nn.init}
    replaced += [getattr(torchs[owner], name) for owner, name in names if owner in torchs]
    ids = {id(value) for value in [*replaced, owners[1]] if not inspect.isfunction(value)}
    assert len(ids) > 90

    def left():
        packages = {"torch", "torchvision", "numpy", "random", "spdl_torch", "tests"}
        return [
            f"{module.__name__}.{name}"
            for module_name, module in list(sys.modules.items())
            if module_name.partition(".")[0] in packages and isinstance(module, ModuleType)
            for name, value in vars(module).items()
            if id(value) in ids
        ]

    assert in_child(left) == []
    assert in_child(left, before=lambda: None) != []


# -- seeding --------------------------------------------------------------------------------------


def test_seeding_acts_on_the_sample():
    """Seeding in a sample repeats what the sample draws, and leaves other samples alone."""

    def draw():
        first = draw_from_all()[:6]
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        seeded = draw_from_all()[:6]
        saved = random.getstate(), np.random.get_state(), torch.get_rng_state()
        drawn_next = draw_from_all()[:6]
        random.setstate(saved[0])
        np.random.set_state(saved[1])
        torch.set_rng_state(saved[2])
        assert draw_from_all()[:6] == drawn_next
        return first, seeded

    def check():
        before = states()
        values = drawn(draw)
        assert states() == before
        return values, drawn(lambda: draw_from_all()[:6])

    values, unseeded = in_child(check)
    assert [first for first, _ in values] == unseeded
    expected = random.Random(3), np.random.RandomState(3), torch.Generator().manual_seed(3)
    numbers = [expected[0].random(), expected[0].gauss(0, 1)]
    numbers += [expected[1].rand(), expected[1].standard_normal()]
    numbers += [torch.rand((), generator=expected[2]).item(), expected[0].randrange(1 << 40)]
    assert [seeded for _, seeded in values] == [numbers] * len(KEYS)


def test_initial_seed_is_the_workers():
    """`torch.initial_seed()` returns the worker's seed until the sample itself seeds torch."""

    def draw():
        before = torch.initial_seed()
        torch.rand(())
        torch.manual_seed(5)
        seeded = torch.initial_seed()
        restart_sample()
        return before, seeded, torch.initial_seed()

    def check():
        torch.manual_seed(77)
        return torch.initial_seed(), drawn(draw), torch.initial_seed()

    expected = 77, [[77, 5, 77]] * len(KEYS), 77
    assert in_child(check) == expected
    list(map(drawn, [draw]))  # The parent has replaced the code of the function too.
    assert in_child(check) == expected


# -- outside of samples ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This function is deprecated:DeprecationWarning")
def test_nothing_changes_outside_of_samples():
    """Outside of a sample, all functions continue from the generators of the process."""
    draws = {
        **draws_of(random, RANDOM),
        **draws_of(np.random, NUMPY),
        **{name: draw for name, draw in TORCH.items() if name not in DISTRIBUTIONS},
        **dropouts(),
        "early": lambda: (early_random(), early_rand(), early_gauss(0, 1)),
    }

    def draw():
        # Each keeps a number that was drawn before the functions were replaced.
        values = [random.gauss(0, 1), np.random.randn()]
        values += [(name, plain(draw())) for name, draw in draws.items()]
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        values += [(name, plain(draw())) for name, draw in draws.items()]
        bits = np.random.get_bit_generator()
        np.random.set_bit_generator(np.random.MT19937(7))
        values.append(np.random.rand())
        np.random.set_bit_generator(bits)
        return values, states()

    def keep_numbers():
        random.seed(4)  # A fork seeds it.
        random.gauss(0, 1)
        np.random.randn()

    def redirect_and_sample():
        keep_numbers()
        redirect_draws()
        drawn(draw_from_all)
        threading.Thread(target=drawn, args=[draw_from_all]).start()

    assert in_child(draw, before=redirect_and_sample) == in_child(draw, before=keep_numbers)


def test_helper_threads_draw_from_the_process():
    """A thread that the user's code starts in a sample is at no sample."""

    def draw():
        values = []
        thread = threading.Thread(target=lambda: values.extend(draw_from_all()[:6]))
        thread.start()
        thread.join()
        return values

    def check():
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        return drawn(draw, KEYS[:1])[0]

    expected = in_child(check, before=lambda: None)
    assert in_child(check) == expected


def test_own_generators_stay_as_they_are():
    """Generators that the user makes draw what they draw elsewhere."""

    def draw():
        own = random.Random(3), np.random.RandomState(3), np.random.default_rng(3)
        numbers = [own[0].random(), own[0].gauss(0, 1), own[1].rand(), own[2].random()]
        return [*numbers, copy.deepcopy(own[0]).random(), pickle.loads(pickle.dumps(own[1])).rand()]

    assert in_child(drawn, draw) == [draw()] * len(KEYS)


def test_replaced_functions_can_be_pickled():
    """The replaced functions can be pickled, and in another process they are the originals."""
    functions = [torch.rand, torch.Tensor.uniform_, torch.dropout, nn.init.normal_]

    def pickles():
        held = torch.rand, torch.Tensor.uniform_, torch.dropout, nn.init.normal_
        return pickle.dumps(held), pickle.dumps([random.random, random.shuffle, np.random.rand])

    of_torch, of_others = in_child(pickles)
    assert list(pickle.loads(of_torch)) == functions
    pickle.loads(of_others)
    assert type(pickle.loads(of_others)[1].__self__) is random.Random


def test_redirecting_twice_does_nothing():
    """To redirect draws again changes no function."""

    def functions():
        return [
            torch.rand,
            torch.Tensor.uniform_,
            random.random,
            np.random.rand,
            type(random._inst),
        ]

    def check():
        before = functions()
        redirect_draws()
        return all(a is b for a, b in zip(before, functions(), strict=True))

    assert in_child(check)


def test_late_imports_follow_the_sample():
    """torchvision and the user's modules may be imported after the functions were replaced."""
    assert torchvision.__version__
    assert_says_nothing(
        "import random, sys\n"
        "from spdl_torch._random import KeyCursor, redirect_draws, sample_context\n"
        "redirect_draws()\n"
        "assert 'torchvision' not in sys.modules\n"
        "from random import random\n"
        "from numpy.random import rand\n"
        "from torch import randn\n"
        "from torchvision.transforms import Pad, RandomChoice\n"
        "choice = RandomChoice([Pad(n) for n in range(99)])\n"
        "import torch\n"
        "def draw():\n"
        "    with sample_context(KeyCursor((1, 2))):\n"
        "        return random(), rand(), randn(()).item(), choice(torch.ones(1, 9, 9)).shape\n"
        "assert draw() == draw()\n"
    )
