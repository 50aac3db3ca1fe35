// Draws the report that the proxy gives at /status, once a second while somebody looks.
// Whatever comes from nodes and clients is put into the page as text, never as markup.
"use strict";

const POLL_MS = 1000;
const ANSWER_MS = 8000;
const WINDOW_S = 30;
const MAX_LANES = 16;
const MIN_LANES = 4;
const LANE_PX = 20;
const MAX_INCIDENTS = 40;
const KEY = "pdserve-key";
const SVG = "http://www.w3.org/2000/svg";

const byId = (id) => document.getElementById(id);

function make(name, fields = {}, ...children) {
  const element = Object.assign(document.createElement(name), fields);
  element.append(...children);
  return element;
}

function draw(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// Brings the children of `parent` in line with `items`. One that stays is updated in place and keeps the focus.
function align(parent, items, keyOf, create, update) {
  const old = new Map(Array.from(parent.children, (child) => [child.dataset.key, child]));
  let before = null;
  for (const item of items) {
    const key = keyOf(item);
    let child = old.get(key);
    if (child === undefined) {
      child = create(item);
      child.dataset.key = key;
    }
    old.delete(key);
    const next = before === null ? parent.firstElementChild : before.nextElementSibling;
    if (next !== child) parent.insertBefore(child, next);
    update(child, item);
    before = child;
  }
  for (const child of old.values()) child.remove();
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Shows parts of text with dots between those that share a line: the style hides the dot of a line's first part.
function setParts(element, parts) {
  element.classList.add("parts");
  const shown = parts.filter(Boolean);
  while (element.children.length > shown.length) element.lastElementChild.remove();
  while (element.children.length < shown.length) element.append(make("span"));
  shown.forEach((part, at) => setText(element.children[at], part));
}

// How numbers are written.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

function amount(value) {
  if (value === null || value === undefined) return "–";
  return (value < 100 ? tenths : whole).format(value);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.0995) return `${tenths.format(seconds * 1000)} ms`;
  if (seconds < 0.9995) return `${whole.format(seconds * 1000)} ms`;
  if (seconds < 9.995) return `${seconds.toFixed(2)} s`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  if (seconds < 7200) return `${whole.format(seconds / 60)} min`;
  if (seconds < 172800) return `${whole.format(seconds / 3600)} h`;
  return `${whole.format(seconds / 86400)} days`;
}

const mebi = (bytes) => (bytes ? amount(bytes / 2 ** 20) : "0");

const count = (number, what) => `${whole.format(number)} ${what}${number === 1 ? "" : "s"}`;

// What is asked of the proxy.

const stored = () => sessionStorage.getItem(KEY);

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (stored()) headers.authorization = `Bearer ${stored()}`;
  const signal = AbortSignal.timeout(ANSWER_MS);
  const answer = await fetch(path, { ...options, headers, signal, credentials: "omit", cache: "no-store" });
  if (answer.ok) return answer.json();
  const body = await answer.json().catch(() => null);
  const error = new Error(body?.error?.message ?? `the proxy answered ${answer.status}`);
  error.status = answer.status;
  throw error;
}

// Figures.

function showFigure(id, value, unit, detail) {
  const figure = byId(id);
  const shown = figure.querySelector(".value");
  if (!shown.firstChild) shown.append(document.createTextNode(""), make("small"));
  if (shown.firstChild.data !== value) shown.firstChild.data = value;
  setText(shown.lastChild, unit);
  setParts(figure.querySelector(".detail"), detail);
}

const SPARKS = 60; // the steps that the proxy remembers

function showSpark(id, before, value) {
  const values = [...before.slice(-SPARKS), value ?? 0];
  const most = Math.max(...values, 1e-9);
  const points = values.map((one, at) => {
    const x = at * (76 / Math.max(values.length - 1, 1));
    return `${x.toFixed(1)},${(22 - (one / most) * 20).toFixed(1)}`;
  });
  const svg = byId(id).querySelector(".spark");
  if (!svg.firstChild) {
    svg.setAttribute("viewBox", "0 0 76 24");
    svg.append(draw("path"));
  }
  svg.firstChild.setAttribute("d", `M${points.join("L")}`);
}

function showPercentiles(id, found) {
  const [value, unit = ""] = duration(found.p50).split(" ");
  showFigure(id, value, ` ${unit} median`.replace("  ", " "), [`p95 ${duration(found.p95)}`, `p99 ${duration(found.p99)}`]);
}

function showFigures(report) {
  const underWay = Object.values(report.stages).reduce((sum, number) => sum + number, 0);
  const { rates, latencies, history } = report;
  const failing = rates.failures_per_s > 0 ? `${amount(rates.failures_per_s)} fail/s` : "";
  showFigure("requests", amount(rates.requests_per_s), " /s", [`${whole.format(underWay)} under way`, failing]);
  showSpark("requests", history.requests_per_s, rates.requests_per_s);
  showFigure("tokens", amount(rates.generated_tokens_per_s), " /s", [`prompts ${amount(rates.prompt_tokens_per_s)} /s`]);
  showSpark("tokens", history.generated_tokens_per_s, rates.generated_tokens_per_s);
  showPercentiles("ttft", latencies.ttft);
  showPercentiles("itl", latencies.itl);
  showPercentiles("e2e", latencies.e2e);
}

// Nodes.

const COLUMNS = [
  ["Running", "wide"], ["KV cache", "wide"], ["Waiting", "number"], ["Tokens/s", "number"],
  ["Prompt tok/s", "number"], ["Step", "number"], ["Links", "links"], ["Version", ""],
];

const TRANSPORTS = { mapped: "mapped", shared_memory: "shared", rdma: "RDMA", tcp: "TCP", other: "other" };

function gauge() {
  const bar = make("span", { className: "bar" }, make("span", { className: "fill" }));
  bar.style.display = bar.firstChild.style.display = "block";
  return make("span", { className: "gauge" }, bar, make("span", { className: "said" }));
}

function setGauge(element, share, said) {
  element.querySelector(".fill").style.width = `${Math.round(Math.min(share ?? 0, 1) * 100)}%`;
  element.classList.toggle("full", (share ?? 0) > 0.9);
  setText(element.querySelector(".said"), said);
}

function nodeRow() {
  const name = make("td", { className: "name" }, make("span"), make("span", { className: "state" }));
  const role = make("td", { className: "role-cell" }, make("span", { className: "role" }));
  const cells = COLUMNS.map(([label, className]) => {
    const cell = make("td", { className });
    cell.dataset.label = label;
    if (className === "wide") cell.append(gauge());
    return cell;
  });
  return make("tr", {}, name, role, ...cells, make("td"));
}

function updateNode(row, node, mayCommand) {
  const [name, role, running, cache, waiting, tokens, prompts, step, links, version, commands] = row.children;
  setText(name.firstChild, node.name);
  name.title = `${node.url} · ${node.model}`;
  const late = node.heartbeat_age_s > 2 * latest.heartbeat_s + 0.5 ? `last heard of ${duration(node.heartbeat_age_s)} ago` : "";
  setParts(name.lastChild, [node.state === "serving" ? "" : node.state, late]);
  setText(role.firstChild, node.role);
  role.firstChild.className = `role ${node.role}`;
  const share = node.max_running ? node.running / node.max_running : 0;
  setGauge(running.firstChild, share, `${whole.format(node.running)} / ${whole.format(node.max_running)}`);
  setGauge(cache.firstChild, node.kv_used, node.kv_used === null ? "–" : `${Math.round(node.kv_used * 100)} %`);
  setText(waiting, whole.format(node.waiting));
  const drafts = node.accepted_drafts_per_s ? ` (${Math.round((100 * node.accepted_drafts_per_s) / node.generated_tokens_per_s)} % drafts)` : "";
  setText(tokens, amount(node.generated_tokens_per_s) + drafts);
  setText(prompts, amount(node.prompt_tokens_per_s));
  setText(step, node.step_s ? duration(node.step_s) : "–");
  setText(links, Object.entries(node.links).map(([kind, number]) => `${number} ${TRANSPORTS[kind] ?? kind}`).join(", ") || "–");
  links.title = "links that have moved KV blocks, by what carries them";
  setText(version, node.version || `protocol ${node.protocol}`);
  version.title = `protocol ${node.protocol}${node.kernels ? ` · ${node.kernels}` : ""}`;
  if (mayCommand && !commands.firstChild) {
    const button = make("button", { type: "button", textContent: "Command" });
    button.addEventListener("click", () => openNode(row.dataset.key));
    commands.append(button);
  } else if (!mayCommand) commands.replaceChildren();
  if (commands.firstChild) commands.firstChild.setAttribute("aria-label", `Command ${node.name}`);
}

function showNodes(report, mayCommand) {
  const models = [...new Set(report.nodes.map((node) => node.model))];
  const more = report.nodes_left_out ? `${count(report.nodes_left_out, "more node")} not shown` : "";
  const none = report.nodes.length ? "" : "No node is registered.";
  setParts(byId("nodes-detail"), [none || models.slice(0, 4).join(", "), more]);
  const update = (row, node) => updateNode(row, node, mayCommand);
  align(byId("nodes").tBodies[0], report.nodes, (node) => node.boot_id, nodeRow, update);
}

// What each group of a node's cache holds. Most models have one group, and the table of nodes says all of that.

const KEEPS = {
  all: () => "every block",
  window: (group) => `what the last ${count(group.window, "token")} touch`,
  latest: () => "the state after all tokens",
};

function groupRow() {
  const cells = ["Group", "Keeps", "Blocks", "Memory"].map((label) => {
    const cell = make("td", label === "Blocks" ? { className: "wide" } : {});
    cell.dataset.label = label;
    if (label === "Blocks") cell.append(gauge());
    return cell;
  });
  return make("tr", {}, make("td", { className: "name" }), ...cells);
}

function updateGroup(row, { node, group }) {
  const [name, what, keeps, blocks, memory] = row.children;
  const { used_blocks: used, num_blocks: all, block_bytes: bytes } = group;
  setText(name, node.name);
  setText(what, group.name);
  setText(keeps, KEEPS[group.keep]?.(group) ?? group.keep);
  setGauge(blocks.firstChild, all ? used / all : 0, `${whole.format(used)} / ${whole.format(all)}`);
  setText(memory, bytes ? `${mebi(used * bytes)} / ${mebi(all * bytes)} MiB` : "none: no layer has keys there");
}

function showGroups(report) {
  const groups = report.nodes.flatMap((node) => node.cache_groups.map((group) => ({ node, group })));
  byId("groups-section").hidden = groups.length === 0;
  align(byId("groups").tBodies[0], groups, ({ node, group }) => `${node.boot_id} ${group.name}`, groupRow, updateGroup);
}

// Commands.

function openNode(bootId) {
  const node = latest?.nodes.find((one) => one.boot_id === bootId);
  if (!node) return;
  setText(byId("node-title"), node.name);
  setText(byId("node-about"), `${node.role} node of ${node.model}, at ${node.url}`);
  setText(byId("node-result"), "");
  const roles = ["prefill", "decode", "mixed"].filter((role) => role !== node.role).map((role) =>
    choice(bootId, `Make it a ${role} node`, "", { kind: "set_role", role }));
  byId("node-choices").replaceChildren(...roles, choice(bootId, "Drain and end it", "grave", { kind: "drain" }));
  byId("node-dialog").showModal();
}

function choice(bootId, textContent, className, command) {
  const button = make("button", { type: "button", textContent, className });
  button.addEventListener("click", async () => {
    const buttons = byId("node-choices").querySelectorAll("button");
    for (const one of buttons) one.disabled = true;
    setText(byId("node-result"), "Sending the command …");
    try {
      const result = await ask("commands", {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify({ node: bootId, command }),
      });
      const role = `It is a ${result.role} node now.`;
      setText(byId("node-result"), command.kind === "drain" ? "It drains: it takes no new work, and ends." : role);
    } catch (error) {
      setText(byId("node-result"), `It was not done: ${error.message}`);
      for (const one of buttons) one.disabled = false;
    }
  });
  return button;
}

// The timeline of all requests.

const lanes = new Map();

// Gives each request a lane, which it keeps while it is shown.
function placeInLanes(requests, now) {
  const free = new Array(MAX_LANES).fill(-Infinity);
  const shown = new Set(requests.map(keyOf));
  for (const key of lanes.keys()) if (!shown.has(key)) lanes.delete(key);
  for (const one of requests) {
    const lane = lanes.get(keyOf(one));
    if (lane !== undefined) free[lane] = Math.max(free[lane], one.ended_s ?? now);
  }
  for (const one of requests) {
    if (lanes.has(keyOf(one))) continue;
    const lane = free.findIndex((until) => until < one.arrived_s);
    if (lane < 0) continue;
    lanes.set(keyOf(one), lane);
    free[lane] = one.ended_s ?? now;
  }
}

const keyOf = (request) => `${request.id} ${request.arrived_s}`;
const nodesOf = (request) => [request.prefill, request.decode].filter(Boolean).join(" → ") || "no node yet";
const STAGES = {
  queued: "queued", prompt: "until the first token", answer: "answering", resuming: "between two nodes", ended: "ended",
};
const hasFailed = (request) => request.ended_s !== undefined && request.outcome !== "ok" && request.outcome !== "client_gone";

function segments(request, now) {
  const end = request.ended_s ?? now;
  const sent = request.sent_s ?? end;
  const first = Math.min(request.prompt_done_s ?? end, end);
  const parts = [["queued", request.arrived_s, sent], ["prompt", sent, first], ["answer", first, end]];
  for (const [from, to] of request.pauses ?? []) parts.push(["pause", from, to]);
  if (hasFailed(request)) parts.push(["failed", end, end]);
  return parts;
}

function showTimeline(report) {
  const svg = byId("timeline");
  const width = svg.clientWidth;
  if (!width) return;
  const now = report.now_s;
  const from = now - WINDOW_S;
  const x = (at) => Math.max(0, Math.min(1, (at - from) / WINDOW_S)) * width;
  const requests = [...report.ended.filter((one) => one.ended_s >= from), ...report.under_way];
  requests.sort((one, other) => one.arrived_s - other.arrived_s);
  placeInLanes(requests, now);
  const placed = requests.filter((one) => lanes.has(keyOf(one)));
  const most = Math.max(MIN_LANES, Number(svg.dataset.lanes ?? 0), ...placed.map((one) => lanes.get(keyOf(one)) + 1));
  svg.dataset.lanes = most;
  const height = most * LANE_PX + 22;
  svg.setAttribute("height", height);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  if (!svg.firstChild) svg.append(draw("g"), draw("g"));
  const [axis, bars] = svg.children;
  const ticks = [];
  for (let ago = WINDOW_S; ago >= 0; ago -= 5) {
    const at = Math.round(x(now - ago) * 2) / 2;
    const anchor = ago === WINDOW_S ? "start" : ago === 0 ? "end" : "middle";
    const label = draw("text", { x: at, y: height - 5, "text-anchor": anchor });
    label.textContent = ago === 0 ? "now" : `−${ago} s`;
    ticks.push(draw("line", { class: "grid", x1: at, x2: at, y1: 0, y2: height - 20 }), label);
  }
  axis.replaceChildren(...ticks);
  align(bars, placed, keyOf, newBar, (bar, one) => updateBar(bar, one, now, x));
  const hidden = report.under_way_left_out + requests.length - placed.length;
  const none = requests.length ? "" : "No request is under way.";
  setText(byId("timeline-detail"), hidden > 0 ? `${count(hidden, "more request")} not shown` : none);
}

function newBar(request) {
  const bar = draw("g", { tabindex: 0, role: "button" }, draw("title"));
  bar.addEventListener("click", () => openRequest(bar.request));
  bar.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    openRequest(bar.request);
  });
  return bar;
}

function updateBar(bar, request, now, x) {
  bar.request = request;
  const y = lanes.get(keyOf(request)) * LANE_PX + 2;
  const height = LANE_PX - 5;
  const parts = segments(request, now).map(([kind, from, to]) => {
    const left = x(from);
    const least = kind === "failed" ? 4 : kind === "pause" ? 2 : 0;
    return draw("rect", { class: kind, x: left - (kind === "failed" ? 4 : 0), y, width: Math.max(x(to) - left, least), height, rx: 1.5 });
  });
  const left = x(request.arrived_s);
  const right = x(request.ended_s ?? now);
  parts.push(draw("rect", { class: "hit", x: left, y, width: Math.max(right - left, 6), height }));
  // The last node is named where it answers: before a pause, another one did.
  const answered = x(Math.max(request.prompt_done_s ?? now, ...(request.pauses ?? []).map(([, to]) => to)));
  if (right - answered > 80 && request.decode) {
    const label = draw("text", { class: "inside", x: answered + 6, y: y + 11.5 });
    label.textContent = request.decode.length * 6.6 < right - answered - 10 ? request.decode : "";
    parts.splice(3, 0, label);
  }
  const told = `${request.id}: ${nodesOf(request)}, ${STAGES[request.stage]}, ${duration((request.ended_s ?? now) - request.arrived_s)}`;
  bar.setAttribute("aria-label", told);
  setText(bar.firstChild, told);
  bar.replaceChildren(bar.firstChild, ...parts);
}

// One request.

function openRequest(request) {
  const now = latest.now_s;
  const end = request.ended_s ?? now;
  setText(byId("request-title"), request.id);
  const stage = request.ended_s === undefined ? STAGES[request.stage] : `${request.outcome}, status ${request.status}`;
  const facts = [
    ["Route", request.route],
    ["Nodes", nodesOf(request)],
    ["State", stage],
    ["Queued", duration((request.sent_s ?? end) - request.arrived_s)],
    ["First token", request.first_token && request.prompt_done_s ? duration(request.prompt_done_s - request.arrived_s) : "–"],
    ["In all", duration(end - request.arrived_s)],
    ["Attempts", whole.format(request.attempts ?? 0)],
  ];
  for (const [from, to] of request.pauses ?? []) facts.push(["Pause", `${duration(to - from)}, ${duration(from - request.arrived_s)} after the beginning`]);
  byId("request-facts").replaceChildren(...facts.flatMap(([name, value]) =>
    [make("dt", { textContent: name }), make("dd", { textContent: value })]));
  byId("request-picture").hidden = true;
  setText(byId("request-note"), "Asking the nodes …");
  byId("request-dialog").showModal();
  fetchTimeline(request);
}

async function fetchTimeline(request) {
  let timeline = null;
  let note = "";
  try {
    timeline = await ask(`requests/${encodeURIComponent(request.id)}/timeline`);
    if (timeline.silent?.length) note = `These nodes did not answer: ${timeline.silent.join(", ")}.`;
  } catch (error) {
    note = error.message;
  }
  if (byId("request-title").textContent !== request.id) return; // another request was opened meanwhile
  setText(byId("request-note"), note);
  byId("request-picture").hidden = timeline === null;
  if (timeline !== null) drawTimeline(timeline);
}

const PROCESSES = { proxy: "proxy", api: "API process", engine: "engine", prefill_engine: "prefill engine" };
const UNDER = ["chunk", "push"]; // these go on beside other phases of their part
const LABEL_PX = 17;
const PHASE_PX = 13;

function drawTimeline(timeline) {
  const svg = byId("request-timeline");
  const width = svg.clientWidth;
  const all = Math.max(timeline.duration_s, 1e-3);
  const x = (at) => Math.max(0, Math.min(1, at / all)) * width;
  const shapes = [];
  let y = 0;
  for (const part of timeline.parts) {
    const label = draw("text", { x: 0, y: y + 12 });
    label.textContent = partLabel(part);
    shapes.push(label);
    y += LABEL_PX;
    const box = (kind, from, to, top, height, told) => {
      const title = draw("title");
      title.textContent = told;
      shapes.push(draw("rect", { class: kind, x: x(from), y: top, width: Math.max(x(to) - x(from), 1.5), height, rx: 1.5 }, title));
    };
    const phases = part.phases ?? [];
    for (const one of phases) if (!UNDER.includes(one.kind)) box(one.kind, one.start_s, one.end_s, y, PHASE_PX, phaseText(one));
    for (const gap of part.gaps?.longest ?? []) box("pause", gap.start_s, gap.start_s + gap.seconds, y, PHASE_PX, `gap of ${duration(gap.seconds)}`);
    for (const one of part.moments ?? []) {
      const title = draw("title");
      title.textContent = `${one.kind.replaceAll("_", " ")} at ${duration(one.at_s)}${one.node ? ` · ${one.node}` : ""}`;
      const at = Math.max(1, Math.min(width - 1, x(one.at_s)));
      shapes.push(draw("line", { class: "moment", x1: at, x2: at, y1: y - 2, y2: y + PHASE_PX + 2 }, title));
    }
    y += PHASE_PX + 2;
    const under = phases.filter((one) => UNDER.includes(one.kind));
    for (const one of under) box(one.kind, one.start_s, one.end_s, one.kind === "push" ? y + 7 : y, 5, phaseText(one));
    y += under.some((one) => one.kind === "push") ? 15 : under.length ? 8 : 2;
  }
  for (let step = 0; step <= 4; step += 1) {
    const anchor = step === 0 ? "start" : step === 4 ? "end" : "middle";
    const label = draw("text", { x: x((all * step) / 4), y: y + 16, "text-anchor": anchor });
    label.textContent = step === 0 ? "0" : duration((all * step) / 4);
    const at = Math.round(x((all * step) / 4));
    shapes.unshift(draw("line", { class: "grid", x1: at, x2: at, y1: 0, y2: y + 3 }));
    shapes.push(label);
  }
  svg.setAttribute("height", y + 20);
  svg.setAttribute("viewBox", `0 0 ${width} ${y + 20}`);
  svg.replaceChildren(...shapes);
}

function partLabel(part) {
  const process = PROCESSES[part.process] ?? part.process;
  const error = part.clock_error_s > 0.001 ? ` · times ± ${duration(part.clock_error_s)}` : "";
  return `${part.node ? `${part.node}, ${process}` : process}${part.outcome ? ` · ${part.outcome}` : ""}${error}`;
}

function phaseText(phase) {
  const said = [`${phase.kind} ${duration(phase.end_s - phase.start_s)}`];
  for (const what of ["tokens", "blocks"]) if (phase[what]) said.push(`${whole.format(phase[what])} ${what}`);
  if (phase.moved_bytes) said.push(`${whole.format(phase.moved_bytes / 1024)} KiB`);
  if (phase.node) said.push(phase.node);
  if (phase.outcome) said.push(phase.outcome);
  return said.join(" · ");
}

// What happened.

const KINDS = {
  request_failed: ["Request failed", "bad"],
  attempt_failed: ["Attempt failed", "bad"],
  resumed: ["Answer resumed", "warn"],
  moved: ["Answer moved", ""],
  node_joined: ["Node joined", ""],
  node_lost: ["Node lost", "bad"],
  node_left: ["Node left", ""],
  node_drains: ["Node drains", "warn"],
  role_changed: ["Role changed", ""],
  cores_shared: ["Cores shared", "warn"],
  proxies_changed: ["Proxies changed", "warn"],
  commanded: ["Command", ""],
};

function incidentLine() {
  const said = make("span", { className: "said" }, make("span", { className: "name" }), make("span"), make("span", { className: "times" }), make("span"));
  return make("li", {}, make("time"), make("span", { className: "kind" }), said);
}

function updateIncident(line, incident, report) {
  const [time, kind, said] = line.children;
  const [label, grave] = KINDS[incident.kind] ?? [incident.kind, ""];
  const at = new Date((report.unix_s - report.now_s + incident.at_s) * 1000);
  setText(time, at.toLocaleTimeString("en-GB"));
  time.dateTime = at.toISOString();
  line.className = grave;
  setText(kind, label);
  const [node, text, times, request] = said.children;
  setText(node, incident.node ? `${incident.node} ` : "");
  setText(text, incident.text);
  setText(times, incident.count > 1 ? ` × ${whole.format(incident.count)}` : "");
  setText(request, incident.request ? ` (${incident.count > 1 ? "last " : ""}${incident.request})` : "");
  request.className = "quiet";
}

function showIncidents(report) {
  const newest = report.incidents.slice(-MAX_INCIDENTS).reverse();
  const key = (one) => `${one.kind} ${one.node ?? ""} ${one.text} ${one.count > 1 ? "" : one.at_s}`;
  const seen = new Map();
  const keyed = newest.map((one) => {
    const number = (seen.get(key(one)) ?? 0) + 1;
    seen.set(key(one), number);
    return { one, key: `${key(one)} ${number}` };
  });
  align(byId("incidents"), keyed, (item) => item.key, incidentLine, (line, item) => updateIncident(line, item.one, report));
}

// The life of the page.

let latest = null;
let timer = null;
let turn = 0;

function show({ report, may_command: mayCommand }) {
  latest = report;
  const workers = report.workers > 1 ? count(report.workers, "worker") : "";
  setParts(byId("about"), [report.version, `up ${duration(report.uptime_s)}`, workers]);
  setText(byId("key"), mayCommand ? "Admin key" : "Key");
  showFigures(report);
  showNodes(report, mayCommand);
  showGroups(report);
  showTimeline(report);
  showIncidents(report);
}

function setConnection(state, text) {
  byId("connection").className = state;
  setText(byId("connection"), text);
  byId("report").classList.toggle("stale", state === "lost");
}

async function poll() {
  const mine = ++turn;
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const answer = await ask("status");
    if (mine !== turn) return;
    show(answer);
    setConnection("live", "Live");
    showLock(null);
  } catch (error) {
    if (mine !== turn) return;
    const refused = error.status === 401 || error.status === 403;
    if (refused && latest === null) {
      setConnection("", "Locked");
      showLock(error);
    } else setConnection("lost", error.status ? error.message : `No answer since ${lastTime()}`);
    if (error.status === 401) {
      askForKey(stored() ? "The proxy does not accept this key." : "This proxy shows its status to those with a key: an admin key, if it has any.");
      return;
    }
  }
  timer = setTimeout(poll, POLL_MS);
}

// What a person sees in place of the cluster where the proxy does not show it.
function showLock(error) {
  byId("locked").hidden = error === null;
  byId("report").hidden = error !== null;
  if (error === null) return;
  byId("locked-key").hidden = byId("locked-unlock").hidden = error.status !== 401;
  setText(byId("locked-why"), `The proxy says: ${error.message}.`);
}

function lastTime() {
  return latest === null ? "the page was opened" : new Date(latest.unix_s * 1000).toLocaleTimeString("en-GB");
}

function askForKey(why) {
  setText(byId("key-why"), why);
  byId("key-input").value = "";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

for (const button of [byId("key"), byId("locked-unlock")]) {
  button.addEventListener("click", () => askForKey("An admin key shows the cluster and commands its nodes. Where there is none, an API key shows it."));
}
byId("key-dialog").addEventListener("close", () => {
  // A browser may send this event only after somebody opened the dialog again, and typed into it.
  if (byId("key-dialog").open) return;
  const typed = byId("key-input").value.trim();
  byId("key-input").value = "";
  const wish = byId("key-dialog").returnValue;
  byId("key-dialog").returnValue = "";
  if (wish === "use" && typed) sessionStorage.setItem(KEY, typed);
  else if (wish === "forget") sessionStorage.removeItem(KEY);
  else return;
  poll();
});
byId("key-input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  byId("key-dialog").close("use");
});
document.addEventListener("visibilitychange", poll);
new ResizeObserver(() => latest && showTimeline(latest)).observe(byId("timeline"));
poll();
