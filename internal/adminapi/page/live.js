// Shows the mesh as it runs, by the services of the admin port. One watch brings the figures each
// second while the page is visible; what is clicked is asked for when it is clicked. A token is
// kept in the page's memory alone.

const second = 1000;
// How old figures may be, in ms, before they are shown as stale, and before the watch begins anew.
const staleAfter = 3.5 * second;
const deadAfter = 10 * second;

let token = "";
let isAsking = false;
let asker = null; // where the focus was when a token was asked for
let shown; // the figures on the page
let shownAt = 0;
let begunAt = 0; // when the watch began
let lost = ""; // why there are no new ones
let watching = new AbortController();
let wake = () => {};

// Elements.

const byID = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const out = Object.assign(document.createElement(tag), properties);
  out.append(...children);
  return out;
}

function draw(tag, attributes = {}, ...children) {
  const out = document.createElementNS("http://www.w3.org/2000/svg", tag);
  Object.entries(attributes).forEach(([name, value]) => out.setAttribute(name, String(value)));
  out.append(...children);
  return out;
}

function setText(of, text) {
  if (of.textContent !== text) {
    of.textContent = text;
  }
}

const actions = new WeakMap(); // what a click on a button of a table does

/**
 * Shows rows in a table and changes only what differs, so that focus and selection stay. A head
 * that begins with "#" is of numbers, one with "~" of long texts.
 * @param {HTMLTableElement} table
 * @param {string[]} heads
 * @param {(string | {text: string, open?: () => void, bad?: boolean})[][]} rows
 */
function fill(table, heads, rows) {
  const kinds = heads.map((head) => ({ "#": "number", "~": "long" })[head[0]] ?? "");
  if (table.tHead?.rows[0].cells.length !== heads.length) {
    const cells = heads.map((head, i) => make("th", { scope: "col", className: kinds[i] }, head.replace(/^[#~]/, "")));
    table.replaceChildren(make("thead", {}, make("tr", {}, ...cells)), make("tbody"));
  }
  const body = table.tBodies[0];
  while (body.rows.length > rows.length) {
    body.deleteRow(-1);
  }
  rows.forEach((cells, i) => {
    const row = body.rows[i] ?? body.appendChild(make("tr", {}, ...kinds.map((className) => make("td", { className }))));
    cells.forEach((cell, j) => {
      const { text, open, bad = false } = typeof cell === "string" ? { text: cell } : cell;
      const at = row.cells[j];
      at.classList.toggle("bad", bad);
      if ((open === undefined) !== (at.firstElementChild === null)) {
        const button = make("button", { type: "button" });
        button.addEventListener("click", () => actions.get(button)?.());
        at.replaceChildren(...(open === undefined ? [] : [button]));
      }
      setText(at.firstElementChild ?? at, text);
      if (open !== undefined) {
        actions.set(at.firstElementChild, open);
      }
    });
  });
}

// A table in a frame that scrolls, and a list of the terms that are not empty.
function tableOf(heads, rows) {
  const table = make("table");
  fill(table, heads, rows);
  return make("div", { className: "wide", tabIndex: 0 }, table);
}

const terms = (pairs) => make("dl", {}, ...pairs.filter(([, text]) => text !== undefined && text !== "")
  .flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, String(text))]));

// Texts.

const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

const number = (n) => (n === undefined ? "–" : n < 99.95 ? n.toFixed(1) : Math.round(n).toLocaleString("en"));

// Seconds as a text with three digits, and of a duration in JSON.
function duration(s) {
  if (s === undefined) {
    return "–";
  }
  const [unit, size] = s >= 1 || s === 0 ? ["s", 1] : s >= 1e-3 ? ["ms", 1e-3] : ["µs", 1e-6];
  return `${s === 0 || s >= 100 * size ? Math.round(s / size) : (s / size).toPrecision(3)} ${unit}`;
}

const seconds = (text) => (text === undefined ? undefined : Number.parseFloat(text));

const clock = (at) => new Date(at).toLocaleTimeString("en-GB");

function age(at) {
  const past = Math.max(0, Math.round((Date.now() - Date.parse(at)) / second));
  const [unit, size] = [["d", 86400], ["h", 3600], ["m", 60]].find(([, least]) => past >= least) ?? ["s", 1];
  return at === undefined ? "" : `${Math.floor(past / size)} ${unit}`;
}

const failuresOf = (requests) => Object.entries(requests?.failuresPerSecond ?? {})
  .sort(([, a], [, b]) => b - a).map(([reason, n]) => `${reason} ${number(n)}/s`).join(", ");

const busy = (of) => `${number(of.busySlots)} of ${of.slots ?? 0}`;

// How many hosts of a stage take items and, after ›, how many it should have where that differs.
function hostsOf(stage) {
  const has = (stage.hosts ?? []).filter((h) => (h.state ?? "ready") === "ready").length;
  const wanted = stage.hostsWanted && (stage.hostsWanted.hosts ?? 0);
  return wanted === undefined || wanted === has ? String(has) : `${has} › ${wanted}`;
}

// What is wrong with a stage. One that needs no host now may have none.
function wrong(stage) {
  if (!stage.served && !stage.queuesCause) {
    return stage.hostsWanted && !stage.hostsWanted.hosts ? "" : "no host";
  }
  return stage.unhealthyCause ?? stage.queuesCause ?? "";
}

// Calls.

const failure = (code, message) => Object.assign(new Error(message), { code });

async function post(method, contentType, body, signal) {
  const headers = { "Content-Type": contentType, ...(token && { Authorization: `Bearer ${token}` }) };
  const response = await fetch(`stagemesh.admin.v1.${method}`, { method: "POST", headers, body, signal })
    .catch(() => { throw failure("", "the gateway does not answer"); });
  if (!response.ok) {
    const answer = await response.json().catch(() => ({}));
    throw failure(answer.code ?? "", answer.message ?? answer.error?.message ?? response.statusText);
  }
  return response;
}

const call = async (method, request = {}) => (await post(method, "application/json", JSON.stringify(request))).json();

// The messages of a stream: each is behind a byte of flags and its length.
async function* stream(method, signal) {
  const lengthAt = 1;
  const head = 5;
  const isEnd = 2;
  const empty = new Uint8Array([0, 0, 0, 0, 2, ...new TextEncoder().encode("{}")]);
  const reader = (await post(method, "application/connect+json", empty, signal)).body.getReader();
  for (let rest = new Uint8Array(); ;) {
    const { value } = await reader.read().catch(() => ({}));
    if (value === undefined) {
      throw failure("", "the gateway has ended the connection");
    }
    const joined = new Uint8Array(rest.length + value.length);
    joined.set(rest);
    joined.set(value, rest.length);
    rest = joined;
    for (let end; rest.length >= head && rest.length >= (end = head + new DataView(rest.buffer).getUint32(lengthAt)); rest = rest.slice(end)) {
      const message = JSON.parse(new TextDecoder().decode(rest.subarray(head, end)));
      if ((rest[0] & isEnd) !== 0) {
        throw failure(message.error?.code ?? "", message.error?.message ?? "the gateway has ended the watch");
      }
      yield message;
    }
  }
}

// Shows what a call failed with, and asks for another token where that may help.
function report(error) {
  const isUnknown = error.code === "unauthenticated";
  if (isUnknown || error.code === "permission_denied") {
    asker = byID("ask").contains(document.activeElement) ? asker : document.activeElement;
    byID("ask").hidden = false;
    byID("dismiss").hidden = isUnknown;
    byID("token").focus({ preventScroll: true });
  }
  if (isUnknown) {
    isAsking = true;
    byID("content").hidden = true;
    close();
  }
  byID("problem").textContent = isUnknown && token === "" ? "" : error.message;
  byID("problem").hidden = byID("problem").textContent === "";
}

// Hides the form for a token, and gives the focus back.
function dismiss() {
  byID("problem").textContent = "";
  byID("ask").hidden = byID("problem").hidden = true;
  asker?.focus();
}

const wait = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });

// Follows the figures as long as somebody looks.
async function follow() {
  for (;;) {
    if (document.hidden || isAsking) {
      await new Promise((resolve) => { wake = resolve; });
    }
    [watching, begunAt] = [new AbortController(), performance.now()];
    try {
      for await (const figures of stream("MeshService/WatchFigures", watching.signal)) {
        if (byID("content").hidden) {
          byID("content").hidden = false;
          byID("ask").hidden = byID("problem").hidden = true;
        }
        [shown, shownAt, lost] = [figures, performance.now(), ""];
        show();
      }
    } catch (error) {
      lost = error.message;
      if (error.code === "unauthenticated") {
        report(error);
      }
    }
    showState();
    await wait(isAsking ? 0 : second);
  }
}

function showState() {
  const old = performance.now() - shownAt;
  const since = old > staleAfter ? shown?.staleSince ?? shown?.answeredAt : shown?.staleSince;
  const cause = (old > staleAfter && lost) || shown?.staleCause || "no new figures";
  const text = since === undefined ? "live" : `stale since ${clock(since)}: ${cause}`;
  setText(byID("state"), isAsking ? "needs a token" : shown === undefined ? lost || "connecting" : text);
  document.body.classList.toggle("stale", since !== undefined || (shown === undefined && lost !== ""));
  if (performance.now() - Math.max(shownAt, begunAt) > deadAfter) {
    watching.abort();
  }
}

// Figures.

function show() {
  document.title = `${shown.mesh} · stagemesh`;
  setText(byID("mesh"), shown.mesh);
  const r = shown.requests ?? {};
  const failures = failuresOf(r);
  fill(byID("totals"), ["Requests/s", "P50", "P99", "In flight", "Gateways", "Hosts", "Failures", "Durable requests"], [[
    number(r.perSecond), duration(r.p50Seconds), duration(r.p99Seconds), String(shown.requestsInFlight ?? 0), String(shown.gateways ?? 0), String(shown.hosts ?? 0),
    { text: failures || "none", bad: failures !== "" }, { text: shown.storeCause ?? "stored", bad: shown.storeCause !== undefined }]]);
  showGraph();
  fill(byID("stages"), ["Stage", "#Items/s", "#Faults/s", "#Queue", "#Hosts", "#Busy slots", "#Batch", "#Wait P50", "#Wait P99", "#Run P50", "#Run P99", "~State"],
    (shown.stages ?? []).map((s) => [
      { text: s.stage, open: () => openStage(s.stage) }, number(s.itemsPerSecond), { text: number(s.faultsPerSecond), bad: s.faultsPerSecond > 0 },
      String(s.queued ?? 0), hostsOf(s), busy(s), number(s.meanBatch), duration(s.queueWaitP50Seconds), duration(s.queueWaitP99Seconds),
      duration(s.runP50Seconds), duration(s.runP99Seconds), { text: wrong(s) || "ready", bad: wrong(s) !== "" }]));
  showRequests();
  refreshStage();
  showState();
}

let failed; // the last requests that failed, while only these are listed

function showRequests() {
  const isHeld = byID("requests").matches(":hover, :focus-within");
  byID("held").hidden = !isHeld;
  if (!isHeld || byID("requests").tHead === null) { // what is pointed at stays where it is
    showEnded(byID("requests"), failed ?? shown.ended ?? []);
  }
}

// Those of one stage fit into the panel.
function showEnded(table, requests, isOfStage = false) {
  const heads = ["Request", "Ended", "Pipeline", "#Took", "Outcome", "~Message"];
  fill(table, isOfStage ? heads : [...heads, "Stage", "Tenant"], requests.map((r) => {
    const took = seconds(r.total) ?? 0;
    return [
      { text: r.requestId, open: () => openRequest(r.requestId) }, clock(Date.parse(r.admittedAt) + took * second), r.pipeline ?? "", duration(took),
      { text: r.fault?.reason ?? "OK", bad: r.fault !== undefined }, short(r.fault?.message ?? "", 200), ...(isOfStage ? [] : [r.fault?.stage ?? "", r.tenant ?? ""])];
  }));
}

async function loadFailed() {
  const { requests } = await call("MeshService/ListEndedRequests", { failed: true, limit: 100 });
  if (byID("failed").checked) {
    failed = requests ?? [];
    showRequests();
  }
}

// The graph.

const valueText = (value) => String(Object.values(value ?? {})[0]);

function condition(when) {
  const tests = [
    when.equals && `= ${valueText(when.equals)}`, when.in && `in ${when.in.map(valueText).join(", ")}`, when.above !== undefined && `> ${when.above}`,
    when.below !== undefined && `< ${when.below}`, when.matches && `~ ${when.matches}`, when.exists !== undefined && (when.exists ? "exists" : "is absent")];
  return `${when.part ?? when.parameter ?? when.metadata ?? "tenant"} ${tests.filter(Boolean).join(", ")}`;
}

// The branches of a block, each with its steps and a label.
const branchesOf = (block, items) => [
  ...Object.entries(block.parallel?.branches ?? {}).map(([name, b]) => [b.steps, name]),
  ...Object.entries(block.split?.branches ?? {}).map(([name, b]) => [b.steps, `${name} ${b.weight ?? 0} %`]),
  ...(block.switch?.cases ?? []).filter((c) => !c.fail).map((c) => [c.steps, c.when ? condition(c.when) : "else"]),
  ...(block.map ? [[block.map.steps, `for each${items === undefined ? "" : ` × ${number(items)}`}`]] : []),
  ...(block.try ? [[block.try.steps, "try"], [block.try.else, "on failure"]] : []),
];

// The edges between pipelines and stages, by the order of steps.
function edgesOf(pipelines) {
  const edges = new Map();
  for (const { pipeline, maps } of pipelines) {
    const join = (from, to, label) => {
      const edge = edges.get(`${from} ${to}`) ?? { from, to, labels: new Set(), pipelines: new Set() };
      edges.set(`${from} ${to}`, edge);
      edge.pipelines.add(pipeline.name);
      if (label !== "") {
        edge.labels.add(short(label, 28));
      }
    };
    // Returns the nodes after which the step behind the steps comes.
    const walk = (steps, before, path, label) => (steps ?? []).reduce((tails, step, i) => {
      const first = i === 0 ? label : "";
      if (step.stage) {
        tails.filter((tail) => tail !== `stage ${step.stage}`).forEach((tail) => join(tail, `stage ${step.stage}`, first));
        return [`stage ${step.stage}`];
      }
      const items = (maps ?? []).find((m) => m.path === path + step.name)?.items;
      return [...new Set(branchesOf(step, items).flatMap(([of, name]) => walk(of, tails, `${path}${step.name}/`, name)))];
    }, before);
    walk(pipeline.steps, [`pipeline ${pipeline.name}`], "", "");
  }
  return [...edges.values()];
}

const margin = 16;
const columnWidth = 308;
const gap = 18;
const sizes = { pipeline: { width: 190, height: 78 }, stage: { width: 210, height: 106 }, bend: { width: 210, height: 10 } };

// Nodes are in layers, behind those that come before them; an edge that closes a circle goes back.
function setLayers(nodes, edges) {
  const order = [];
  const entered = new Set();
  const visit = (id) => {
    entered.add(id);
    for (const e of edges.filter((one) => one.from === id)) {
      e.back = entered.has(e.to) && !order.includes(e.to);
      if (!entered.has(e.to)) {
        visit(e.to);
      }
    }
    order.unshift(id);
  };
  [...nodes.keys()].forEach((id) => entered.has(id) || visit(id));
  for (const id of order) {
    for (const e of edges.filter((one) => one.from === id && !one.back)) {
      nodes.get(e.to).layer = Math.max(nodes.get(e.to).layer, nodes.get(id).layer + 1);
    }
  }
}

// Places nodes in columns, near those that they are joined with.
function place(nodes) {
  const layers = [];
  nodes.forEach((n) => (layers[n.layer] ??= []).push(n));
  const columns = layers.filter(Boolean);
  const mean = (of, value, otherwise) => (of.length === 0 ? otherwise : of.reduce((sum, n) => sum + value(n), 0) / of.length);
  const sweep = (sides, arrange) => sides.forEach((side) => (side === "behind" ? columns : columns.toReversed()).forEach((column) => arrange(column, side)));
  sweep(["behind", "ahead", "behind", "ahead", "behind"], (column, side) => {
    column.forEach((n, i) => { n.weight = mean(n[side], (other) => other.rank, n.rank ?? i); });
    column.sort((a, b) => a.weight - b.weight).forEach((n, i) => { n.rank = i; });
  });
  sweep(["behind", "ahead", "behind"], (column, side) => {
    let least = margin;
    for (const n of column) {
      n.x = margin + n.layer * columnWidth;
      n.y = Math.max(least, mean(n[side], (other) => other.y + other.height / 2, n.y + n.height / 2) - n.height / 2);
      least = n.y + n.height + gap;
    }
  });
  const above = Math.min(...nodes.map((n) => n.y)) - margin;
  nodes.forEach((n) => { n.y -= above; });
}

let graph = { key: "", nodes: new Map(), edges: [] };

function showGraph() {
  const [pipelines, stages] = [shown.pipelines ?? [], shown.stages ?? []];
  const edges = edgesOf(pipelines);
  const ids = [...pipelines.map((p) => `pipeline ${p.pipeline.name}`), ...stages.map((s) => `stage ${s.stage}`)];
  const key = JSON.stringify([ids, edges.map((e) => [e.from, e.to, e.labels.size > 0])]);
  if (key !== graph.key) {
    drawGraph(key, ids, edges);
  }
  edges.forEach((e, i) => graph.edges[i].text && setText(graph.edges[i].text, [...e.labels].join(" · ")));
  for (const { pipeline, requests: r } of pipelines) {
    const bad = failuresOf(r);
    update(`pipeline ${pipeline.name}`, { name: pipeline.name, one: `${number(r?.perSecond)} requests/s`, two: `P50 ${duration(r?.p50Seconds)} · P99 ${duration(r?.p99Seconds)}`, bad }, bad !== "");
  }
  for (const s of stages) {
    update(`stage ${s.stage}`, {
      name: s.stage, one: `${number(s.itemsPerSecond)} items/s · batch ${number(s.meanBatch)}`, two: `wait ${duration(s.queueWaitP50Seconds)} · run ${duration(s.runP50Seconds)}`,
      three: `queue ${s.queued ?? 0} · ${busy(s)} busy`, bad: wrong(s) || (s.faultsPerSecond > 0 ? `${number(s.faultsPerSecond)} faults/s` : ""),
    }, wrong(s) !== "");
    showHosts(s, graph.nodes.get(`stage ${s.stage}`).parts);
  }
}

function update(id, texts, isBad) {
  const { parts } = graph.nodes.get(id);
  Object.entries(texts).forEach(([part, text]) => setText(parts[part], short(text, 32)));
  parts.node.classList.toggle("bad", isBad);
  parts.node.setAttribute("aria-label", `${id}: ${Object.values(texts).slice(1).filter(Boolean).join(", ")}`);
}

// Shows how busy a stage is, and a square for each of its hosts.
function showHosts(stage, parts) {
  const most = 7;
  const hosts = stage.hosts ?? [];
  parts.fill.setAttribute("width", Math.min(1, (stage.busySlots ?? 0) / Math.max(1, stage.slots ?? 0)) * (sizes.stage.width - 20));
  while (parts.hosts.children.length > Math.min(most, hosts.length)) {
    parts.hosts.lastElementChild.remove();
  }
  hosts.slice(0, most).forEach((host, i) => {
    const square = parts.hosts.children[i] ?? parts.hosts.appendChild(draw("rect", { x: 10 + i * 13, y: 89, width: 9, height: 9, rx: 2 }, draw("title")));
    square.setAttribute("class", `host ${{ ready: "", draining: "draining" }[host.state ?? "ready"] ?? "off"}`);
    setText(square.firstElementChild, `${host.host}: ${host.state ?? "running"}, ${busy(host)} busy`);
  });
  setText(parts.more, hosts.length > most ? `+${hosts.length - most}` : "");
}

function drawGraph(key, ids, allEdges) {
  const nodeOf = (id, kind, layer) => ({ id, kind, name: id.slice(kind.length + 1), layer, y: 0, height: sizes[kind].height, ahead: [], behind: [] });
  const nodes = new Map(ids.map((id) => [id, id.startsWith("stage ") ? nodeOf(id, "stage", 1) : nodeOf(id, "pipeline", 0)]));
  const edges = allEdges.filter((e) => nodes.has(e.from) && nodes.has(e.to)); // stages of a new pipeline may come later
  setLayers(nodes, edges);
  const all = [...nodes.values()];
  edges.forEach((e) => {
    e.line = [nodes.get(e.from)];
    for (let layer = e.line[0].layer + 1; layer < nodes.get(e.to).layer; layer++) { // it goes between the nodes of other layers
      e.line.push(nodeOf("", "bend", layer));
    }
    all.push(...e.line.slice(1));
    e.line.push(nodes.get(e.to));
    if (!e.back) {
      e.line.slice(1).forEach((n, i) => {
        n.behind.push(e.line[i]);
        e.line[i].ahead.push(n);
      });
    }
  });
  place(all);
  const width = Math.max(0, ...all.map((n) => n.x + sizes[n.kind].width)) + margin;
  const height = Math.max(0, ...all.map((n) => n.y + n.height)) + margin;
  const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  const texts = [];
  for (const e of edges) {
    const curves = e.line.slice(1).map((to, i) => {
      const from = e.line[i];
      const [x1, y1, x2, y2] = [from.x + sizes[from.kind].width, from.y + from.height / 2, to.x, to.y + to.height / 2];
      const bend = Math.max(40, Math.abs(x2 - x1) / 2);
      if (i === 0 && e.labels.size > 0) {
        e.text = draw("text", { class: "label", x: (x1 + x2) / 2, y: (y1 + y2) / 2 - 5 });
        texts.push(e.text);
      }
      return `${i === 0 ? "M" : "L"}${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`;
    });
    e.path = draw("path", { class: "edge", d: curves.join(" ") });
    svg.append(e.path);
  }
  svg.append(...[...nodes.values()].map(drawNode), ...texts);
  graph = { key, nodes, edges: allEdges };
  byID("graph").replaceChildren(svg);
}

function drawNode(n) {
  const { width, height } = sizes[n.kind];
  const isStage = n.kind === "stage";
  const node = draw("g", { class: `node ${n.kind}`, transform: `translate(${n.x},${n.y})`, tabindex: 0, role: isStage ? "button" : "img" }, draw("rect", { class: "box", width, height, rx: 8 }));
  n.parts = { node };
  const add = (part, tag, attributes) => {
    n.parts[part] = draw(tag, attributes);
    node.append(n.parts[part]);
  };
  add("name", "text", { class: "name", x: 10, y: 20 });
  add("one", "text", { x: 10, y: 37 });
  add("two", "text", { class: "faint", x: 10, y: 52 });
  add("bad", "text", isStage ? { class: "bad", x: width - 10, y: 98, "text-anchor": "end" } : { class: "bad", x: 10, y: 68 });
  if (!isStage) {
    Object.entries({ mouseenter: n.name, focus: n.name, mouseleave: "", blur: "" }).forEach(([event, name]) => node.addEventListener(event, () => choose(name)));
    return node;
  }
  add("three", "text", { class: "faint", x: 10, y: 67 });
  add("track", "rect", { class: "track", x: 10, y: 76, width: width - 20, height: 5, rx: 2 });
  add("fill", "rect", { class: "fill", x: 10, y: 76, width: 0, height: 5, rx: 2 });
  add("hosts", "g", {});
  add("more", "text", { class: "faint", x: 102, y: 98 });
  node.addEventListener("click", () => openStage(n.name));
  node.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      openStage(n.name);
    }
  });
  return node;
}

// Shows which edges and stages are of a pipeline; all for the empty name.
function choose(pipeline) {
  byID("graph").classList.toggle("chosen", pipeline !== "");
  graph.nodes.forEach((n) => n.parts.node.classList.toggle("on", n.id === `pipeline ${pipeline}`));
  for (const e of graph.edges) {
    const isOn = e.pipelines.has(pipeline);
    [e.path, e.text].forEach((part) => part?.classList.toggle("on", isOn));
    if (isOn) {
      graph.nodes.get(e.to)?.parts.node.classList.add("on");
    }
  }
}

// What was clicked.

let opened = ""; // what the panel shows: "stage NAME", "request ID", "dead letter NUMBER", or nothing
let before = null; // where the focus was

function open(what, ...content) {
  const isNew = opened !== what;
  if (opened === "") {
    before = document.activeElement;
  }
  opened = what;
  setText(byID("detail-head"), what);
  byID("detail-body").replaceChildren(...content);
  byID("detail").hidden = false;
  if (isNew) {
    byID("detail").scrollTop = 0;
    byID("detail-head").focus();
  }
}

function close() {
  if (opened !== "") {
    opened = "";
    byID("detail").hidden = true;
    before?.focus();
  }
}

function openStage(name) {
  open(`stage ${name}`, make("div", { id: "about" }), make("h3", {}, "Hosts"), tableOf([], []), make("h3", { id: "workers" }, "Workers"), tableOf([], []),
    make("h3", {}, "Last requests that failed here"), make("p", { id: "none", className: "faint" }, "none is known"), tableOf([], []));
  refreshStage();
  loadFaults().catch(report);
}

function refreshStage() {
  const stage = opened.startsWith("stage ") && (shown.stages ?? []).find((s) => `stage ${s.stage}` === opened);
  if (!stage) {
    return;
  }
  const hosts = stage.hosts ?? [];
  const [table, workers] = byID("detail-body").querySelectorAll("table");
  byID("about").replaceChildren(terms([
    ["Problem", wrong(stage)], ["Queue", `${stage.queued ?? 0} items wait for a slot`], ["Busy", `${busy(stage)} slots`],
    ["Hosts wanted", stage.hostsWanted && `${stage.hostsWanted.hosts ?? 0}: ${stage.hostsWanted.reason}`],
    ["Pipelines", [...new Set(graph.edges.filter((e) => e.to === opened).flatMap((e) => [...e.pipelines]))].join(", ")]]));
  fill(table, ["Host", "State", "#Busy slots", "#In flight", "#Queued", "Up", "~Engine"], hosts.map((h) => [
    h.host, { text: [h.state ?? "running", h.cause].filter(Boolean).join(": "), bad: (h.state ?? "ready") !== "ready" }, busy(h),
    String(h.inFlight ?? 0), String(h.queued ?? 0), age(h.startedAt), h.engine ?? ""]));
  const rows = hosts.flatMap((h) => (h.workers ?? []).map((w) => [h.host, String(w.index ?? 0), { text: w.state, bad: w.state !== "READY" }, w.incarnation ?? "0", w.cause ?? ""]));
  fill(workers, ["Host", "#Worker", "State", "#Starts", "~Cause"], rows);
  byID("workers").hidden = workers.parentElement.hidden = rows.length === 0;
}

async function loadFaults() {
  const of = opened;
  const { requests = [] } = await call("MeshService/ListEndedRequests", { stage: of.replace("stage ", ""), limit: 20 });
  if (opened === of) {
    const table = byID("detail-body").querySelectorAll("table")[2];
    showEnded(table, requests, true);
    table.parentElement.hidden = requests.length === 0;
    byID("none").hidden = requests.length > 0;
  }
}

async function openRequest(id) {
  const what = `request ${id}`;
  open(what, make("p", {}, "asking the gateways and hosts"));
  for (let isRunning = true; isRunning && opened === what; await wait(second)) {
    let content;
    try {
      const answer = (await call("MeshService/ExplainRequest", { requestId: id })).report;
      content = reportOf(answer);
      isRunning = answer.source === "REQUEST_SOURCE_IN_FLIGHT";
    } catch (error) {
      content = [make("p", { className: "bad" }, error.message)];
      isRunning = false;
    }
    if (opened === what) {
      open(what, ...content);
    }
  }
}

// What is known of a request.
function reportOf(r) {
  const usual = (took, of) => duration(seconds(took) ?? 0) + (of === undefined ? "" : ` (${duration(seconds(of))})`);
  const steps = (r.steps ?? []).map(({ timing: t, usual: u }) => [
    t.path || t.step || "", usual(t.queueWait, u?.queueWait), usual(t.batchWait, u?.batchWait), usual(t.run, u?.run), `${t.batchSize ?? 0}${u === undefined ? "" : ` (${u.batchSize ?? 0})`}`,
    t.dispatchReason ?? "", String(t.attempt ?? 0), t.stage ?? "", t.host ?? ""]);
  const kinds = [["queue", "queue"], ["batch", "waiting for its batch"], ["run", "run"]];
  return [
    make("ul", { id: "summary" }, ...(r.summary ?? []).map((sentence) => make("li", {}, sentence))),
    make("h3", {}, "Where the time went"),
    make("p", { className: "legend faint" }, ...kinds.map(([className, text]) => make("span", { className }, text)), "between them it is on its way"),
    waterfall(r),
    ...(steps.length === 0 ? [] : [make("p", { className: "faint" }, "In brackets: what is usual."),
      tableOf(["Step", "#Queue", "#Batch wait", "#Run", "#Batch", "Dispatch", "#Delivery", "Stage", "Host"], steps)]),
    terms([["Pipeline", r.pipeline], ["Tenant", r.tenant], ["Gateway", r.gateway], ["Admitted", r.admittedAt && `${clock(r.admittedAt)}, ${age(r.admittedAt)} ago`],
      ["Took", r.total && usual(r.total, r.usualTotal)], ["Fault", r.fault && `${r.fault.reason}: ${r.fault.message}`], ["Trace", r.traceId],
      ["Dead letter", r.deadLetter], ["Durability", (r.durability ?? "").replace("DURABILITY_", "").toLowerCase()]]),
  ];
}

// Bars of what a request waited for, one below the other.
function waterfall(r) {
  let end = 0;
  const rows = (r.steps ?? []).map(({ timing: t }) => {
    const waits = [["queue", seconds(t.queueWait) ?? 0], ["batch", seconds(t.batchWait) ?? 0], ["run", seconds(t.run) ?? 0]];
    const begin = Math.max(0, t.arrival === undefined ? end : seconds(t.arrival) - waits[0][1]); // clocks of hosts may differ
    end = begin + waits.reduce((sum, [, took]) => sum + took, 0);
    return { name: t.path || t.step || t.stage, begin, end, waits };
  });
  for (const b of r.branches ?? []) {
    const [begin, took] = [seconds(b.began) ?? 0, seconds(b.took) ?? 0];
    rows.push({ name: `${b.path} ${[b.status, b.why].filter(Boolean).join(", ")}`, begin, end: begin + took, waits: [["branch", took]] });
  }
  rows.sort((a, b) => a.begin - b.begin || b.end - a.end);
  const total = Math.max(seconds(r.total) ?? (Date.now() - Date.parse(r.admittedAt)) / second, 1e-6, ...rows.map((row) => row.end));
  const [left, width, high, bottom] = [190, 460, 24, (rows.length + 1) * 24];
  const svg = draw("svg", { class: "waterfall", viewBox: `0 0 ${left + width + 70} ${bottom + 4}`, role: "img", "aria-label": `Timeline of ${duration(total)}; the table below has its figures` });
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    const x = left + part * width;
    svg.append(draw("line", { x1: x, x2: x, y1: high - 6, y2: bottom }), draw("text", { class: "faint", x, y: 12, "text-anchor": "middle" }, part === 0 ? "0" : duration(part * total)));
  }
  rows.forEach((row, i) => {
    const y = (i + 1) * high;
    let x = left + (row.begin / total) * width;
    svg.append(draw("text", { x: 0, y: y + 15 }, short(row.name, 30)));
    for (const [name, took] of row.waits) {
      const wide = Math.max(took > 0 ? 1.5 : 0, (took / total) * width);
      svg.append(draw("rect", { class: name, x, y: y + 4, width: wide, height: 14, rx: 2 }, draw("title", {}, `${name} ${duration(took)}`)));
      x += wide;
    }
    svg.append(draw("text", { class: "faint", x: x + 6, y: y + 15 }, duration(row.end - row.begin)));
  });
  return svg;
}

// Jobs and dead letters, which are asked for while their sections are open.

async function loadJobs() {
  const [{ pools = [] }, { queues = [] }] = await Promise.all([call("JobAdminService/ListGates"), call("JobAdminService/ListQueues")]);
  fill(byID("gates"), ["Pool", "State", "~Why nothing is sent", "Since", "Gate", "#Reading", "#Baseline", "#May run", "#Running"], pools.map((p) => [
    p.pool, { text: p.state ?? "", bad: p.state !== "open" }, p.why ?? "", age(p.since), p.source ?? "", number(p.d ?? 0), number(p.b ?? 0), number(p.n ?? 0), String(p.out ?? 0)]));
  fill(byID("queues"), ["Queue", "Pool", "State", "#Waiting", "#Delayed", "#Running", "Oldest", "Change"], queues.map((q) => {
    const to = q.state === "paused" ? "Resume" : "Pause";
    return [q.name, q.pool ?? "", { text: q.state ?? "", bad: q.state !== "open" }, q.queued ?? "0", q.delayed ?? "0", q.running ?? "0", age(q.oldest),
      { text: to, open: () => call(`JobAdminService/${to}Queue`, { name: q.name }).then(loadJobs).catch(report) }];
  }));
}

async function loadLetters() {
  const { deadLetters = [], next } = await call("DeadLetterService/ListDeadLetters", { limit: 200 });
  fill(byID("letters"), ["Number", "When", "Of", "Pipeline", "Reason", "~Message"], deadLetters.map((d) => [
    { text: d.seq, open: () => openLetter(d.seq).catch(report) }, `${age(d.deadLetteredAt)} ago`, d.stage || `queue ${d.queue}`, d.pipeline ?? "", { text: d.reason ?? "", bad: true }, d.message ?? ""]));
  setText(byID("letters-note"), deadLetters.length === 0 ? "There are none." : next === undefined ? "" : "These are the oldest 200.");
}

// The most bytes of a payload that the page shows and sends; as base64 they fit the 8 MiB of a request.
const maxBody = 5 << 20;

async function openLetter(seq) {
  const { deadLetter: d } = await call("DeadLetterService/GetDeadLetter", { seq });
  const s = d.summary;
  const parts = d.item?.parts ?? d.job?.parts ?? [];
  const outcome = make("p", { id: "outcome", role: "status" });
  const buttons = [];
  const button = (label, does) => {
    const out = make("button", { type: "button" }, label);
    out.addEventListener("click", () => does().catch((error) => {
      if (document.activeElement === document.body) {
        out.focus(); // it lost the focus while it was disabled
      }
      report(error);
    }));
    buttons.push(out);
    return out;
  };
  const replay = async (body) => {
    buttons.forEach((one) => { one.disabled = true; }); // a letter is replayed once
    try {
      const to = await call("DeadLetterService/ReplayDeadLetter", { seq, ...body });
      const request = make("button", { type: "button" }, to.requestId);
      request.addEventListener("click", () => openRequest(to.requestId));
      outcome.replaceChildren("Replayed as ", ...(to.requestId ? ["request ", request] : [`job ${to.jobId}`]), to.deadLetterRemains ? "; the dead letter could not be deleted, delete it yourself." : ".");
      buttons.forEach((one) => { one.disabled = one.textContent !== "Delete" || !to.deadLetterRemains; });
    } catch (error) {
      buttons.forEach((one) => { one.disabled = false; });
      throw error;
    }
    await loadLetters();
  };
  const remove = async () => {
    if (window.confirm(`Delete dead letter ${seq}? This cannot be undone.`)) {
      await call("DeadLetterService/DeleteDeadLetter", { seq });
      close();
      await loadLetters();
    }
  };
  const types = parts.map((p) => `${p.name || "(no name)"}: ${p.blob ? p.blob.contentType || "bytes" : `${p.tensor?.datatype} [${p.tensor?.shape ?? ""}]`}, ${p.size ?? 0} bytes`);
  open(`dead letter ${seq}`,
    terms([["Why", `${d.fault?.reason}: ${d.fault?.message}`], ["Of", s.stage ? `stage ${s.stage}` : `queue ${s.queue}`], ["Pipeline", s.pipeline], ["Tenant", s.tenant || d.item?.tenant],
      ["Request", s.requestId], ["Job", s.jobId], ["Host", d.host], ["When", s.deadLetteredAt], ["Deliveries", s.deliveries], ["Crashes", s.crashCount], ["Payload", types.join("; ")], ["Not replayable", d.notReplayable]]),
    make("p", { className: "row" }, ...(s.replayable ? [button("Replay", () => replay({}))] : []), button("Delete", remove)), outcome,
    ...(s.replayable ? editor(seq, parts, button, replay) : []));
}

// The payload of a dead letter, to be loaded, changed, and replayed.
function editor(seq, parts, button, replay) {
  const head = make("h3", {}, "Replay with another payload");
  if (parts.length !== 1 || parts[0].tensor) {
    return [head, make("p", { className: "faint" }, "This payload is a tensor or has several parts: it can only be replayed as it is.")];
  }
  const text = make("textarea", { id: "body", spellcheck: false });
  const file = make("input", { id: "file", type: "file" });
  const note = make("p", { id: "body-note", className: "faint", role: "status" });
  let lineEnd = "\n";
  text.addEventListener("input", () => {
    file.value = "";
  });
  const load = async () => {
    const { deadLetter: d } = await call("DeadLetterService/GetDeadLetter", { seq, bodyBytes: maxBody });
    try {
      const loaded = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(Uint8Array.from(atob(d.body), (letter) => letter.charCodeAt(0)));
      text.value = loaded; // with \n for each line end
      lineEnd = text.value === loaded ? "\n" : "\r\n";
      if (text.value.replaceAll("\n", lineEnd) !== loaded) {
        text.value = "";
        note.textContent = "The payload has line ends of several kinds, which a text field does not keep: choose a file to send instead.";
        return;
      }
      file.value = note.textContent = "";
      text.focus();
    } catch {
      note.textContent = d.body === undefined ? `The payload has more than ${maxBody >> 20} MiB. To write it to a file: stagemesh dead-letters show ${seq} --body FILE`
        : `The payload is not text, but ${parts[0].blob.contentType || "bytes"}: choose a file to send instead.`;
    }
  };
  const send = async () => {
    const body = file.files[0] ?? new Blob([text.value.replaceAll("\n", lineEnd)]);
    if (body.size > maxBody) {
      throw failure("", `the payload has ${body.size.toLocaleString("en")} bytes, here at most ${maxBody >> 20} MiB; stagemesh dead-letters replay ${seq} --body FILE takes almost 8 MiB`);
    }
    if (body.size === 0 && !window.confirm("Replay it with an empty payload?")) {
      return;
    }
    const url = await new Promise((resolve, reject) => {
      const reader = Object.assign(new FileReader(), { onload: () => resolve(reader.result), onerror: () => reject(reader.error) });
      reader.readAsDataURL(body);
    });
    await replay({ body: url.split(",")[1] ?? "" });
  };
  return [head, make("p", { className: "row" }, button("Load payload", load)), note, make("label", { htmlFor: "body" }, "Send this text"), text,
    make("p", {}, make("label", { htmlFor: "file" }, "or a file instead "), file), make("p", { className: "row" }, button("Replay with this payload", send))];
}

// Loads again what is open.
let refreshing = false;

function refresh() {
  if (document.hidden || isAsking || shown === undefined || refreshing) {
    return;
  }
  refreshing = true; // one round at a time
  const quiet = (error) => error.code === "unauthenticated" && report(error);
  const none = (table) => (error) => quiet(error) || (error.code && fill(byID(table), ["~There is nothing to show"], [[error.message]]));
  Promise.all([
    byID("jobs").open && loadJobs().catch(none("gates")),
    byID("dead").open && loadLetters().catch(none("letters")),
    byID("failed").checked && loadFailed().catch(quiet),
    opened.startsWith("stage ") && loadFaults().catch(quiet),
  ]).finally(() => { refreshing = false; });
}

byID("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byID("token").value.trim();
  byID("token").value = "";
  dismiss();
  isAsking = false;
  watching.abort(); // it has another token
  wake();
});
byID("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = byID("request").value.trim();
  return id && openRequest(id);
});
byID("failed").addEventListener("change", () => {
  failed = byID("failed").checked ? [] : undefined;
  showRequests();
  refresh();
});
byID("jobs").addEventListener("toggle", refresh);
byID("dead").addEventListener("toggle", refresh);
byID("close").addEventListener("click", close);
byID("dismiss").addEventListener("click", dismiss);
document.addEventListener("click", () => { byID("problem").hidden = true; }, true);
document.addEventListener("keydown", (event) => event.key === "Escape" && (byID("ask").hidden || isAsking ? close() : dismiss()));
document.addEventListener("visibilitychange", () => (document.hidden ? watching.abort() : wake()));
setInterval(showState, second);
setInterval(refresh, 3 * second);
follow();
