"""One test per lesson that other servers' security records teach.

The numbers are those of the project's table of records; classes that have a test elsewhere are
named here with the place, so that the list is whole: 4 in test_engine.py (prefix rows within a
tenant only), 17 has no code, 26 and 28 in test_architecture.py (no pickle, no torch.load).
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.core.sampling import SamplingParams
from outrider.drafters.base import Commit
from outrider.drafters.hybrid import HybridDrafter, Member
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine import Engine, EngineConfig, FixedBudget
from outrider.serve import plan
from outrider.serve.keys import KeyRing, hash_key
from outrider.serve.schema import REFUSED, ChatRequest, CompletionRequest, Form, Sampled
from outrider.testing.asgi import AsgiClient, Response
from outrider.testing.fakes import END, ByteTokenizer, TableTarget
from outrider.testing.serving import NAME, chat_body, fake_service, text_target, with_client

CHAT = "/v1/chat/completions"
PACKAGE = Path(outrider.__file__).parent
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
SERVE = {path: text for path, text in SOURCES.items() if path.startswith("serve/")}


def post(body: Any, **settings: Any) -> Response:
    return with_client(fake_service(**settings), lambda client: client.post(CHAT, body))


# 1: a drafter that some sampling parameter crashes
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_k": 3},
    {"top_p": 0.5},
    {"min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.0},
    {"frequency_penalty": 1.0},
    {"logit_bias": {1: 5.0, 2: -100.0}},
    {"bad_words": ((3,), (4, 5))},
    {"min_tokens": 8, "stop_token_ids": (2,)},
    {"logprobs": 5},
    {"stop_token_ids": (1,)},
]


def test_1_every_drafter_with_every_sampling_parameter_in_one_batch() -> None:
    drafters = {
        "suffix": SuffixDrafter(),
        "ngram": NgramDrafter(),
        "hybrid": HybridDrafter([Member(SuffixDrafter()), Member(NgramDrafter())]),
    }
    engine = Engine(
        TableTarget(context_length=200),
        drafters=drafters,
        config=EngineConfig(slots=12),
        budget=FixedBudget(6, 4),
    )
    cases = [(d, p) for d in (*drafters, "none") for p in PARAMETERS]
    requests = [
        engine.add([1, 2, 3, 1, 2], SamplingParams(**p, max_tokens=30, seed=9), drafter=d)
        for d, p in cases
    ]
    while engine.has_work:
        engine.step()
    done = [engine.take(request) for request in requests]
    plain = done[-len(PARAMETERS) :]
    for (drafter, parameters), completion in zip(cases, done, strict=True):
        assert completion.error is None, (drafter, parameters)
        assert completion.tokens == plain[PARAMETERS.index(parameters)].tokens


def test_2_padding_never_reaches_grammar_or_text() -> None:
    response = post(chat_body(response_format={"type": "regex", "regex": ".{30}"}, max_tokens=30))
    text = response.json()["choices"][0]["message"]["content"]
    assert len(text) == 30 and all(32 <= ord(character) < 127 for character in text)


def test_3_drafts_and_their_counts_stay_with_their_tenant() -> None:
    drafter = SuffixDrafter()
    drafter.observe([Commit(1, (1, 2, 3), "anna"), Commit(1, (4, 5, 6, 7), "anna")])
    drafter.forget([1])
    assert drafter.store.tokens("anna") > 0 and drafter.store.tokens("bert") == 0
    assert plan.tenant("anna", None) != plan.tenant("bert", None)
    assert plan.tenant("anna", "salt") != plan.tenant("anna", None)
    told = post(chat_body()).json()["metrics"]["speculative_decoding"]
    assert not any(name.startswith("per_step") for name in told)


def test_3_streams_can_be_padded_and_gathered() -> None:
    body = chat_body(stream=True, stream_options={"include_obfuscation": True})
    for event in post(body).body.split(b"\n\n"):
        assert not event or b"[DONE]" in event or (len(event) + 2) % 256 == 0


@pytest.mark.parametrize("field", ["cache_salt", "user", "safety_identifier", "model"])
@pytest.mark.parametrize("value", ["\x00", "a" * 10_000, "\ud800", "a\nb", ""])
def test_5_opaque_strings_are_bounded_at_the_edge(field: str, value: str) -> None:
    response = post(chat_body(**{field: value}))
    assert response.status in (200, 400, 404) and b"Traceback" not in response.body
    if field in ("cache_salt", "model"):
        assert response.status != 200


@pytest.mark.parametrize("token", [-1, 259, 2**31, 2**63, 2**70])
@pytest.mark.parametrize("where", ["logit_bias", "stop_token_ids", "prompt", "detokenize"])
def test_6_and_7_every_token_id_is_checked_before_it_is_an_index(where: str, token: int) -> None:
    service = fake_service()

    async def test(client: AsgiClient) -> Response:
        if where == "prompt":
            return await client.post("/v1/completions", {"model": NAME, "prompt": [1, token]})
        if where == "detokenize":
            return await client.post("/detokenize", {"tokens": [1, token]})
        value = {str(token): 1} if where == "logit_bias" else [token]
        return await client.post(CHAT, chat_body(**{where: value}))

    assert with_client(service, test).status == 400


def test_8_n_is_small() -> None:
    for n in (9, 16384, 2**40):
        assert post(chat_body(n=n)).status == 400


def test_9_one_validator_for_all_endpoints() -> None:
    assert issubclass(ChatRequest, Sampled) and issubclass(CompletionRequest, Sampled)
    for module in ("serve/chat.py", "serve/completions.py"):
        assert "plan.sampling(" in SOURCES[module] and "SamplingParams(" not in SOURCES[module]


FORBIDDEN_IN_SERVE = (
    "request.url",
    "request.base_url",
    ".url_for(",
    'scope["raw_path"]',
    'scope["root_path"]',
    'scope.get("root_path"',
)


def test_10_11_12_nothing_is_decided_on_an_address_rebuilt_from_the_host_header() -> None:
    for path, text in SERVE.items():
        assert not [word for word in FORBIDDEN_IN_SERVE if word in text], path
    service = fake_service(keys=[{"name": "a", "sha256": hash_key("sk-12345678")}])

    async def test(client: AsgiClient) -> None:
        for host in (
            "localhost/health?",
            "localhost#/health",
            "localhost:80/health",
            "a@localhost",
        ):
            response = await client.get("/v1/models", headers={"host": host})
            assert response.status in (401, 403)
        assert (
            await client.get("/v1/models", headers={"x-forwarded-prefix": "/health"})
        ).status == (401)
        for path in ("/health/../v1/models", "/v1/models#/health", "/V1/models", "/v1/models/"):
            assert (await client.get(path)).status in (401, 404)

    with_client(service, test)


def test_13_keys_never_meet_a_query_and_only_their_hashes_are_kept() -> None:
    assert not any("sqlite" in text or "SELECT " in text for text in SERVE.values())
    ring = KeyRing(fake_service(keys=[{"name": "a", "sha256": hash_key("sk-12345678")}]).config)
    assert "sk-12345678" not in repr(vars(ring))
    assert ring.caller(b"Bearer ' OR 1=1 --") is None


@pytest.mark.parametrize("name", ["chat_template", "chat_template_kwargs", "documents"])
def test_14_18_19_no_template_comes_from_a_request(name: str) -> None:
    assert name in REFUSED
    response = post(chat_body(**{name: {"x": "{{ 7 * 7 }}"}}))
    assert response.json()["error"]["code"] == "unsupported_parameter"
    text = post(chat_body("{{ 7 * 7 }}{% for x in range(10**9) %}x{% endfor %}"))
    assert text.status == 200  # text is text


def test_15_a_body_holds_known_fields_only_and_changes_nothing_but_its_answer() -> None:
    def forms(kind: type[Form]) -> list[type[Form]]:
        return [kind, *(form for child in kind.__subclasses__() for form in forms(child))]

    assert all(form.model_config["extra"] == "forbid" for form in forms(Form))
    for name in ("callbacks", "success_callback", "api_base", "extra_body", "__class__"):
        assert post(chat_body(**{name: "http://evil.example"})).status == 400
    service = fake_service()
    before = service.config.model_dump()
    with_client(service, lambda client: client.post(CHAT, chat_body()))
    assert service.config.model_dump() == before


def test_16_operators_paths_are_apart_and_change_nothing() -> None:
    from outrider.serve.app import ADMIN, API, PUBLIC

    assert {method for method, _ in ADMIN} == {"GET"}
    assert set(PUBLIC) == {("GET", "/health"), ("GET", "/ready")}
    words = ("weight", "load", "pause", "key", "invocation", "reset", "profile")
    assert not [p for _, p in (*API, *ADMIN) if any(word in p for word in words)]


HOSTILE = [
    {"type": "regex", "regex": "(" * 2000},
    {"type": "regex", "regex": "((a+)+)+$" * 20},
    {"type": "regex", "regex": "a{1000000000}"},
    {"type": "grammar", "grammar": "start: start start | start"},
    {"type": "grammar", "grammar": '%import "/etc/passwd"'},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "file:///etc/passwd"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": []}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"minItems": -1}}},
    {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(a|a)*" * 500}},
    },
]


@pytest.mark.parametrize("wanted", HOSTILE, ids=range(len(HOSTILE)))
def test_20_21_a_hostile_grammar_ends_itself_and_no_other(wanted: dict[str, Any]) -> None:
    service = fake_service()

    async def test(client: AsgiClient) -> None:
        body = chat_body("other", max_tokens=60)
        other = asyncio.ensure_future(client.post(CHAT, body))
        response = await client.post(CHAT, chat_body(response_format=wanted))
        assert response.status in (200, 400, 500)
        if response.status == 500:  # a limit met while decoding: told in our words
            assert "grammar" in response.json()["error"]["message"]
        assert (await other).status == 200
        assert (await client.get("/health")).status == 200

    with_client(service, test)


def test_22_caches_are_bounded() -> None:
    from outrider.drafters.suffix import SuffixConfig
    from outrider.engine.grammar import CACHED

    config = SuffixConfig()
    assert CACHED <= 256 and config.cached_tokens <= 10**6 and config.max_tenants <= 1024


def test_23_25_27_29_30_no_code_no_objects_and_no_expressions_from_outside() -> None:
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "zmq", "ctypes"}
    for path, text in SERVE.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names]
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not forbidden & {name.split(".")[0] for name in names}, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec", "compile", "__import__"}, path
        assert "yaml.load(" not in text and "shell=True" not in text, path
    for path, text in SOURCES.items():
        assert "trust_remote_code=True" not in text, path


def test_24_no_check_is_an_assert() -> None:
    """Asserts vanish under ``python -O``: none may guard what a client sent."""
    for path in ("app", "keys", "plan", "schema", "wire", "profiles", "errors", "tokens"):
        tree = ast.parse(SERVE[f"serve/{path}.py"])
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Assert)], path


class Leaky(ByteTokenizer):
    """Fails with an address in its message."""

    def chat(self, *args: Any, **options: Any) -> list[int]:
        raise MemoryError(f"at {hex(id(self))} in /secret/place")


def test_31_no_inside_of_an_exception_reaches_a_client() -> None:
    from outrider.testing.serving import FakeModel

    response = post(chat_body(), model=FakeModel(tokenizer=Leaky()))
    assert response.status == 500
    assert b"0x" not in response.body and b"secret" not in response.body


def test_32_keys_are_compared_in_constant_time_all_of_them() -> None:
    source = inspect.getsource(KeyRing.caller)
    assert "compare_digest" in source and "break" not in source and source.count("return") == 3


NUMBERS = [
    ("temperature", -0.5),
    ("top_k", -(2**40)),
    ("max_tokens", -1),
    ("max_tokens", 2**80),
    ("min_tokens", -1),
    ("seed", -(2**70)),
    ("top_p", float(10**300)),
    ("n", True),
    ("temperature", True),
    ("top_logprobs", -1),
    ("frequency_penalty", 1e308),
]


@pytest.mark.parametrize(("name", "value"), NUMBERS, ids=[f"{n}={v}" for n, v in NUMBERS])
def test_33_numbers_are_checked(name: str, value: float) -> None:
    assert post(chat_body(**{name: value})).status == 400


def test_34_models_are_known_names_and_errors_name_no_internals() -> None:
    for name in ("../../etc/passwd", "smollm2-135m", "fake@", "fake@fast@fast", "FAKE", "fake/x"):
        response = post(chat_body(model=name))
        if name == "fake@":
            continue  # no profile named: the default
        assert response.status == 404
        assert "site-packages" not in response.json()["error"]["message"]


def test_limits_have_a_counterpart_each() -> None:
    """vLLM's limit settings: n, prompts, stop, grammar time, template time, body, header, idle."""
    limits = fake_service().config.limits
    assert limits.n <= 8 and limits.prompts and limits.stop and limits.body_bytes
    assert limits.grammar_s <= 5 and limits.template_s <= 30 and limits.header_bytes
    assert limits.body_s and limits.request_s and limits.in_flight


def test_the_gate_can_fail() -> None:
    assert [word for word in FORBIDDEN_IN_SERVE if word in "if request.url.path == '/health':"]


def test_ends_of_turns_in_a_message_do_not_end_the_conversation() -> None:
    tokens = ByteTokenizer().chat([{"role": "user", "content": "<end>"}])
    assert tokens.count(END) == 1
    assert json.loads(post(chat_body("<end><start>")).body)["choices"]
    assert text_target().end_tokens == {END}
