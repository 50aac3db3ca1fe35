"""Tests that every message survives encoding, reads as plain MessagePack, and is refused with unknown content."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest

from pdserve.control.frame import MAX_FRAME_BYTES
from pdserve.http.tls import Certificate
from pdserve.wire import (
    cache_groups,
    command,
    discovery,
    engine,
    engine_counts,
    proxy_workers,
    rank,
    timeline,
    transfer,
)
from pdserve.wire.ids import TransferId
from pdserve.wire.sampling_params import (
    MAX_GRAMMAR_BYTES,
    Grammar,
    GrammarKind,
    PromptLogprobs,
    SampledToken,
    SamplingParams,
    TokenLogprobs,
)
from pdserve.wire.status import Incident, IncidentKind, Pause, RelayStatus, RequestStage, RequestView
from pdserve.wire.terms import (
    AnswerIdentity,
    EventPlace,
    Keep,
    PrefillTarget,
    PromptTerms,
    RequestTargets,
    Resume,
    Storing,
    Ticket,
)
from pdserve.wire.timeline import TraceContext
from pdserve.wire.version import SPOKEN
from pdserve_kvtransfer.pieces import MAX_RANKS
from tests.terms import made_terms, made_ticket

BOOT = bytes(range(16))
OTHER = bytes(range(16, 32))
PROMPT_LOGPROBS = PromptLogprobs(1, bytes(8), bytes(8), bytes(8), bytes(8))
SAMPLING = SamplingParams(max_tokens=8, seed=7, temperature=0.5, stop_token_ids=(1, 2))
CONSTRAINED = SamplingParams(max_tokens=8, seed=7, grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}'))
TARGET = PrefillTarget(name="prefill-0", control="tcp://127.0.0.1:5000", boot_id=OTHER)
HASHES = (bytes(32), bytes(range(32)))
TRANSFER_ID = TransferId(OTHER, 3, BOOT)
SPEC = transfer.EngineSpec(
    protocol=1,
    oldest_protocol=1,
    fingerprint="f",
    dtype="bf16",
    block_size=16,
    num_layers=30,
    kv_heads=3,
    head_dim=64,
    tp_size=1,
)
NODE = discovery.NodeInfo(
    protocol=SPOKEN.newest,
    oldest_protocol=SPOKEN.oldest,
    name="decode-0",
    boot_id=BOOT,
    role=discovery.Role.DECODE,
    url="http://127.0.0.1:8001",
    control="",
    model="smollm2",
    fingerprint="f",
    capacity=discovery.Capacity(
        max_running=4,
        num_blocks=100,
        block_size=16,
        max_model_len=2048,
        groups=(
            discovery.GroupCapacity("whole contexts", cache_groups.Keep.ALL, 100, 4096),
            discovery.GroupCapacity("window 128", cache_groups.Keep.WINDOW, 40, 4096, 128),
        ),
    ),
    compute=discovery.ComputeCores("5f0e", (0, 1, 5), 2),
    answers="9c1f",
    formats="calls hermes, reasoning none",
)
SUSPECTED = proxy_workers.Suspected(
    (proxy_workers.SuspectedRequest(bytes(16), 9, "r", b"client", "two nodes were lost", 9.5),)
)
STATUS = RelayStatus(
    stages={RequestStage.ANSWER: 1},
    under_way=(RequestView("r", "/v1/completions", 9.5, stage=RequestStage.ANSWER, pauses=(Pause(9.6, 9.7),)),),
    ended=(),
    outcomes={"ok": 1},
    incidents=(Incident(IncidentKind.NODE_LOST, 9.5, "no heartbeat", "decode-0"),),
)
REPORT = engine.RequestReport(
    prefill_source=engine.PrefillSource.REMOTE,
    prefill_node="prefill-0",
    placed=engine.PrefillReason.TARGET,
    cached_tokens=16,
    queue_s=0.1,
    prefill_s=0.2,
    transfer_s=0.3,
)

TRACE = TraceContext(OTHER, bytes(range(8)))
PART = timeline.TimelinePart(
    request_id="r",
    process=timeline.ProcessKind.ENGINE,
    start_s=1.0,
    end_s=2.5,
    phases=(timeline.Phase(kind=timeline.PhaseKind.CHUNK, start_s=1.0, end_s=2.0, tokens=9),),
    moments=(timeline.Moment(kind=timeline.MomentKind.PREEMPTED, at_s=2.25),),
    gaps=timeline.Gaps((0, 3), (timeline.Gap(1.5, 0.125),)),
    trace=TRACE,
    span_id=bytes(8),
)

CHANNELS: list[tuple[Any, list[msgspec.Struct]]] = [
    (
        discovery.ToProxy,
        [
            discovery.NodeHello(BOOT, OTHER, 6, 5),
            discovery.Register(NODE),
            discovery.NodeHeartbeat(BOOT, discovery.NodeLoad(1, 2, 3)),
            discovery.NodeHeartbeat(BOOT, discovery.NodeLoad(), discovery.Role.MIXED, draining=True),
            discovery.NodeHeartbeat(BOOT, discovery.NodeLoad(1, 2, 3, queue_s=0.5, step_s=0.02)),
            discovery.NodeHeartbeat(BOOT, discovery.NodeLoad(), proxies=(BOOT, bytes(16))),
            discovery.NodeHeartbeat(
                BOOT,
                discovery.NodeLoad(
                    prompt_tokens=9, generated_tokens=8, gaps=discovery.GapCounts((0.01, 0.1), (1, 2, 3))
                ),
            ),
            discovery.NodeHeartbeat(BOOT, discovery.NodeLoad(links=discovery.LinkCounts(mapped=1, rdma=7, tcp=2**31))),
            discovery.Deregister(BOOT),
        ],
    ),
    (
        discovery.FromProxy,
        [
            discovery.Ack(BOOT, known=False),
            discovery.Ack(BOOT, known=True, role=discovery.Role.PREFILL),
            discovery.MeetNodes(BOOT, (TARGET,)),
            discovery.ProxyWelcome(BOOT, OTHER, 6, 5, heartbeat_ms=1000),
            discovery.ProxyRefusal(BOOT, "why"),
        ],
    ),
    (
        Ticket,
        [
            made_ticket(BOOT, 1, deadline_s=2.5, prefill=(TARGET,)),
            made_ticket(
                BOOT,
                2,
                deadline_s=2.5,
                answer=AnswerIdentity(OTHER, 1_800_000_000),
                resume=Resume(7, bytes(32)),
                client=b"c" * 16,
                cache_owner=b"o" * 16,
                storing=Storing(True, 9),
                trace=TRACE,
                keep=Keep(OTHER, BOOT, bytes(16), EventPlace("0a1b", 7)),
            ),
        ],
    ),
    (
        engine.ToEngine,
        [
            engine.Submit(
                local_id=1,
                uuid=OTHER,
                token_ids=[1, 2, 3],
                sampling=SAMPLING,
                children=(engine.ChildRequest(2, 5, (9, 8)), engine.ChildRequest(3, 6)),
                emitted=(7,),
                terms=made_terms(
                    9.0,
                    prefill=(TARGET,),
                    cache_salt="salt",
                    priority=-100,
                    own_targets=RequestTargets(250.0, 1.0),
                    request_id="chat-1",
                    trace=TRACE,
                ),
            ),
            engine.Submit(local_id=4, uuid=OTHER, token_ids=[1], sampling=CONSTRAINED, terms=made_terms(9.0)),
            engine.Abort([1, 2]),
            engine.Renew(b"the new\nthe old"),
            engine.Assign(discovery.Role.PREFILL),
            engine.Meet(2, (TARGET,)),
            engine.AskStats(3),
            engine.Shutdown(),
        ],
    ),
    (
        engine.FromEngine,
        [
            engine.Starting("loading weights"),
            engine.Ready(
                control="tcp://127.0.0.1:1",
                fingerprint="f",
                num_blocks=10,
                block_size=16,
                max_model_len=64,
                max_running=4,
                vocab_size=49152,
            ),
            engine.StepOutput(
                [
                    engine.RequestOutput(1, [5], prompt_logprobs=PROMPT_LOGPROBS),
                    engine.RequestOutput(2, [6], engine.FinishReason.STOP, REPORT),
                ]
            ),
            engine.Recorded([PART]),
            engine.Met(2),
            engine.Stats(
                engine.EngineStats(
                    queue=engine_counts.QueueStats(running=1),
                    cache=engine_counts.CacheStats(cached_blocks=3),
                    scheduler=engine_counts.SchedulerCounts(prefix_cache_queries=9, prefix_cache_hits=4),
                    transfer=engine_counts.TransferCounts(handshakes=2),
                    transfer_failures={"lease": 2},
                    prefill=engine.PrefillStats(
                        decisions=(engine.PrefillDecisions(engine.PrefillSource.LOCAL, engine.PrefillReason.SHORT, 3),),
                        nodes=(engine.PrefillNodeStats("p0", 1700.5, 512, 0.004, 3e9),),
                        last_remote_s=0.25,
                    ),
                    step=engine.StepStats(shared=4, itl_target_s=0.05, parts={"batch": 0.012}),
                )
            ),
            engine.MoveWanted(7, 912),
            engine.EngineFailed("no memory"),
        ],
    ),
    (
        transfer.ToPrefill,
        [
            transfer.Hello(BOOT, SPEC, [b"address"]),
            transfer.PrefillRequest(
                transfer_id=TRANSFER_ID, tag=9, token_ids=[1, 2], first_block=0, sampling=SAMPLING, deadline_s=1.0
            ),
            transfer.PrefillRequest(
                transfer_id=TRANSFER_ID,
                tag=9,
                token_ids=[1, 2],
                first_block=0,
                sampling=SAMPLING,
                deadline_s=1.0,
                child_seeds=(5, 6),
                paced=True,
                terms=PromptTerms(request_id="chat-1", priority=100, trace=TRACE),
            ),
            transfer.CachedRequest(
                transfer_id=TRANSFER_ID, tag=9, hashes=(bytes(32), bytes(range(32))), deadline_s=1.0
            ),
            transfer.CachedRequest(
                transfer_id=TRANSFER_ID,
                tag=9,
                hashes=(bytes(32),),
                deadline_s=1.0,
                digests=False,
                paced=True,
                request_id="chat-1",
            ),
            transfer.Accept(TRANSFER_ID, 7),
            transfer.Done(TRANSFER_ID),
            transfer.Cancel(TRANSFER_ID),
            transfer.Ping(BOOT),
            transfer.Offer(TARGET, (bytes(32),)),
            transfer.Offer(TARGET, HASHES, "chat-1"),
            transfer.Examine(BOOT, 7, 6),
            transfer.Probe(boot_id=BOOT, address=b"address", message_bytes=4096, messages=8),
            transfer.ProbeEnd(BOOT),
        ],
    ),
    (
        transfer.ToDecode,
        [
            transfer.Welcome(OTHER, SPEC, [b"address"]),
            transfer.Welcome(OTHER, SPEC, [b"address"], 8191, lease_ms=3000),
            transfer.Refused(OTHER, "dtype", "bf16", "fp32"),
            transfer.BlocksReady(TRANSFER_ID, 9),
            transfer.Digests(TRANSFER_ID, 1, 0, 3, (0, 2**64 - 1)),
            transfer.Held(TRANSFER_ID, 0),
            transfer.Held(TRANSFER_ID, 7),
            transfer.FirstToken(
                TRANSFER_ID, (SampledToken(17, TokenLogprobs(-0.5, 1, ((17, -0.5),))), SampledToken(3)), 0
            ),
            transfer.FirstToken(TRANSFER_ID, (SampledToken(3),), 16, transfer.PrefillLoad(512, 1700.5)),
            transfer.FirstToken(TRANSFER_ID, (SampledToken(3),), 0, prompt_logprobs=PROMPT_LOGPROBS),
            transfer.Failed(TRANSFER_ID, "out of blocks"),
            transfer.Failed(
                TRANSFER_ID, "too much to do", transfer.FailureCause.LOAD, transfer.PrefillLoad(512, 1700.5)
            ),
            transfer.Pong(OTHER),
            transfer.Pong(OTHER, transfer.PrefillLoad(512, 1700.5)),
            transfer.Examined(
                boot_id=OTHER,
                version="0.1.0",
                spec=SPEC,
                block_bytes=4096,
                clock_ms=1,
                machine="m",
                ipc_namespace="ipc:[1]",
            ),
            transfer.ProbeOpened(OTHER, b"address"),
            transfer.ProbeRefused(OTHER, "another probe is under way"),
        ],
    ),
    (
        rank.Order,
        [
            rank.LoadModel(num_blocks=10, max_model_len=64),
            rank.Step([rank.RankRow([5, 6], 0, [3], False), rank.RankRow([7], 20, [1, 2], True, 0, 1)]),
            rank.Step([rank.NextRow(0, [7], [], True), rank.NextRow(-1, [150_000], [9], False, 1, [[4], [-1, 5]])]),
            rank.Draft([rank.RankDraft(0, [6], False, [3]), rank.RankDraft(1, [8], True, [1, 2])], 3),
            rank.Clear([1, 2]),
            rank.Capture(max_rows=64),
            rank.CopyBlocks([1], [2]),
            rank.DownloadBlocks([1], [2]),
            rank.UploadBlocks([2], [1]),
            rank.Stop(),
        ],
    ),
    (
        transfer.LinkAddress,
        [
            transfer.LinkAddress(b"worker", 1),
            transfer.LinkAddress(
                b"worker", 2**62 - 1, transfer.MemoryOffer(7, 3, "0123456789abcdef" * 2, 4096, 511, 2**62 - 1)
            ),
        ],
    ),
    (rank.Numbered, [rank.Numbered(3, rank.Stop())]),
    (rank.FromRank, [rank.Arrived(), rank.Loaded(), rank.Captured(), rank.Written(), rank.RankFailed("no memory")]),
    (
        rank.RankCommand,
        [
            *[rank.OpenLink(1, direction) for direction in rank.Direction],
            rank.ConnectLink(1, (b"a", b"b")),
            rank.CloseLink(1),
            rank.Expect(1, 9, 2, (5, 3), True),
            rank.Expect(1, 9, 2, (), True, True),
            rank.ExpectMore(1, 9, (7, 4)),
            rank.Forget(1, 9),
            rank.SendBlocks(1, 9, 2, (5, 3), False),
            rank.LeaveRank(),
        ],
    ),
    (
        rank.RankReport,
        [
            rank.LinkOpened(1, b"address"),
            rank.LinkInUse(1, discovery.TransportKind.TCP, "tcp on eth0", "no verbs"),
            rank.LinkBroken(1, "gone"),
            rank.LinkClosed(1),
            rank.Expecting(1, 9),
            rank.PiecesLanded(1, 9, (4, 5), (2**64 - 1, 0), 8192),
            rank.Forgotten(1, 9, (5,)),
            rank.Released(1, 9, (5,)),
            rank.Dropped(1, 2),
            rank.PiecesSent(1, 9, 2, 8192),
            rank.PiecesAnnounced(1, 9, 0, 2, (7, 8)),
        ],
    ),
    (
        proxy_workers.ToWorker,
        [
            proxy_workers.Nodes(
                (proxy_workers.KnownNode(NODE, discovery.NodeLoad(1, 2, 3), 9.5, True),), ("f",), (BOOT,)
            ),
            proxy_workers.NodesChanged(
                (proxy_workers.KnownNode(NODE, discovery.NodeLoad(1, 2, 3), 9.5, True),), ("f",), (BOOT,), (BOOT,)
            ),
            proxy_workers.Collect(7),
            proxy_workers.Scraped(7, b"text"),
            proxy_workers.CollectStatus(7),
            proxy_workers.StatusReply(7, b"{}"),
            proxy_workers.CollectTimeline(7, "r"),
            proxy_workers.TimelineReply(7, (PART,)),
            proxy_workers.WorkerPing(),
            SUSPECTED,
            proxy_workers.StoreReply(7, True, b"[]", b"start", True),
            proxy_workers.Renewed(
                proxy_workers.Credentials(b"s", (proxy_workers.ApiKey("a", "k", True),), Certificate(b"c", b"k"), b"ca")
            ),
        ],
    ),
    (
        proxy_workers.ToSupervisor,
        [
            proxy_workers.WorkerHello("0.2.0"),
            proxy_workers.WorkerReady(),
            proxy_workers.WorkerPong(),
            SUSPECTED,
            proxy_workers.Scrape(7),
            proxy_workers.AskStatus(7),
            proxy_workers.StatusPart(7, STATUS),
            proxy_workers.AskTimeline(7, "r"),
            proxy_workers.CollectedParts(7, (PART,)),
            proxy_workers.BeginResponse(7, "owner", "resp_1", b"[]", b"start"),
            proxy_workers.FinishResponse(8, 7, "resp_2", b"[]", b"{}"),
            proxy_workers.AbandonResponse(7),
            *[proxy_workers.ReadResponse(9, "owner", "resp_2", part) for part in proxy_workers.ResponsePart],
            proxy_workers.DeleteResponse(9, "owner", "resp_2"),
            proxy_workers.Counts(
                7, (proxy_workers.Family("n", "what", "counter", (proxy_workers.Sample("n_total", {"a": "b"}, 1.0),)),)
            ),
        ],
    ),
    (command.Command, [command.SetRole(discovery.Role.PREFILL), command.Drain(), command.Recall("chat-1")]),
    (timeline.RecalledParts, [timeline.RecalledParts(9.5, 0.001, (PART,))]),
    (
        timeline.Timeline,
        [
            timeline.Timeline(
                request_id="r", began=1e9, duration_s=1.5, finished=True, parts=(PART,), silent=("decode-1",)
            )
        ],
    ),
    (
        command.CommandResult,
        [command.CommandResult(discovery.Role.PREFILL, discovery.Role.DECODE, False, ("tcp://127.0.0.1:8100",))],
    ),
]

MESSAGES = [
    pytest.param(channel, message, id=type(message).__name__) for channel, messages in CHANNELS for message in messages
]


@pytest.mark.parametrize(("channel", "message"), MESSAGES)
def test_comes_back_as_it_went(channel: Any, message: msgspec.Struct) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=channel) == message


def _left_out(message: msgspec.Struct, field: msgspec.structs.FieldInfo) -> bool:
    """Returns whether the message leaves out this field, which has its default, for older peers that do not know it."""
    return message.__struct_config__.omit_defaults and getattr(message, field.name) == field.default


@pytest.mark.parametrize(("channel", "message"), MESSAGES)
def test_is_plain_messagepack_with_its_fields_by_name(channel: Any, message: msgspec.Struct) -> None:
    plain = msgpack.unpackb(msgspec.msgpack.encode(message))
    tag = message.__struct_config__.tag
    fields = {field.encode_name for field in msgspec.structs.fields(message) if not _left_out(message, field)}
    assert set(plain) == fields | ({"kind"} if tag is not None else set())
    assert plain.get("kind") == tag
    assert msgspec.msgpack.decode(msgpack.packb(plain), type=channel) == message


BETWEEN_HOSTS = ("pdserve.wire.command", "pdserve.wire.discovery", "pdserve.wire.timeline", "pdserve.wire.transfer")
ORDERS = (
    *(transfer.PrefillRequest, transfer.CachedRequest, transfer.Probe),
    *(command.SetRole, command.Drain, command.Recall),
)
"""These messages say what to do. The others say what is."""


@pytest.mark.parametrize(("channel", "message"), MESSAGES)
def test_an_unknown_field_is_refused_but_in_what_hosts_state(channel: Any, message: msgspec.Struct) -> None:
    plain = msgpack.unpackb(msgspec.msgpack.encode(message))
    if type(message).__module__ in BETWEEN_HOSTS and not isinstance(message, ORDERS):
        assert msgspec.msgpack.decode(msgpack.packb({**plain, "surprise": 1}), type=channel) == message
        return
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.msgpack.decode(msgpack.packb({**plain, "surprise": 1}), type=channel)


@pytest.mark.parametrize(("channel", "message"), MESSAGES)
def test_a_field_of_another_type_is_refused(channel: Any, message: msgspec.Struct) -> None:
    plain = msgpack.unpackb(msgspec.msgpack.encode(message))
    for name in message.__struct_fields__:
        foreign = msgpack.packb({**plain, name: msgpack.ExtType(5, b"x")})
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(foreign, type=channel)


def test_every_message_of_every_channel_is_covered() -> None:
    covered = {type(message) for _, messages in CHANNELS for message in messages}
    declared = {
        value
        for module in (discovery, engine, rank, transfer)
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value.__module__ == module.__name__
        and not value.__name__.startswith("_")
        and value.__struct_config__.tag is not None
        and not value.__struct_config__.array_like  # a part of a message
    }
    assert declared <= covered


@pytest.mark.parametrize("length", [0, 15, 17])
def test_an_id_of_another_length_is_refused(length: int) -> None:
    frame = msgpack.packb({"kind": "ping", "boot_id": b"x" * length})
    with pytest.raises(msgspec.ValidationError, match="length"):
        msgspec.msgpack.decode(frame, type=transfer.ToPrefill)


@pytest.mark.parametrize(
    ("hashes", "why"),
    [([], "length"), ([bytes(32)] * 65_537, "length"), ([bytes(31)], "length"), ([bytes(32), bytes(33)], "length")],
)
def test_hashes_of_another_number_or_length_are_refused(hashes: list[bytes], why: str) -> None:
    plain = {"kind": "cached", "transfer_id": [OTHER, 3, BOOT], "tag": 9, "hashes": hashes, "deadline_s": 1.0}
    with pytest.raises(msgspec.ValidationError, match=why):
        msgspec.msgpack.decode(msgpack.packb(plain), type=transfer.ToPrefill)


def test_a_request_for_the_most_blocks_fits_into_a_frame_and_into_labels() -> None:
    hashes = tuple(bytes(32) for _ in range(transfer.MAX_HASHES))
    request = transfer.CachedRequest(transfer_id=TRANSFER_ID, tag=9, hashes=hashes, deadline_s=1.0)
    assert len(msgspec.msgpack.encode(request)) < MAX_FRAME_BYTES - 1024
    assert transfer.MAX_HASHES * MAX_RANKS <= 1 << transfer.INDEX_BITS


@pytest.mark.parametrize("tag", [0, 1 << 40])
def test_a_tag_that_does_not_fit_into_ucx_is_refused(tag: int) -> None:
    plain = msgpack.unpackb(msgspec.msgpack.encode(CHANNELS[5][1][1]))
    with pytest.raises(msgspec.ValidationError, match="tag"):
        msgspec.msgpack.decode(msgpack.packb({**plain, "tag": tag}), type=transfer.ToPrefill)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 0), ("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.1), ("min_p", 2.0), ("seed", -1)],
)
def test_sampling_out_of_range_is_refused(name: str, value: float) -> None:
    plain = msgpack.unpackb(msgspec.msgpack.encode(SAMPLING))
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.msgpack.decode(msgpack.packb({**plain, name: value}), type=SamplingParams)


def test_a_grammar_comes_back_and_one_that_is_too_long_is_refused() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(CONSTRAINED), type=SamplingParams) == CONSTRAINED
    plain = {"max_tokens": 1, "seed": 1, "grammar": {"kind": "regex", "text": "a" * (MAX_GRAMMAR_BYTES + 1)}}
    with pytest.raises(msgspec.ValidationError, match="length"):
        msgspec.msgpack.decode(msgpack.packb(plain), type=SamplingParams)
