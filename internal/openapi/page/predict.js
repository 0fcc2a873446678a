// Sends requests to a pipeline by a form made from its spec in the gateway's document, and shows the
// answer, where its time went, and the same call in code. A token is kept in the page's memory alone.
"use strict";

(() => {
  const byID = (id) => document.getElementById(id);
  // The page shows no more of an output, in elements or characters, and no more bars.
  const shownElements = 400;
  const shownText = 20000;
  const shownBars = 50;
  const root = new URL("..", document.baseURI).href.replace(/\/$/, "");

  let token = "";
  const pipelines = new Map();
  let fields = [];
  let sent; // the controller of the request that runs
  let pictures = []; // URLs of blobs that the page shows

  function make(kind, properties, ...children) {
    const out = Object.assign(document.createElement(kind), properties);
    out.append(...children);
    return out;
  }

  function tell(text) {
    byID("problem").textContent = text;
    byID("problem").hidden = text === "";
  }

  const authorization = () => (token === "" ? {} : { Authorization: `Bearer ${token}` });
  const isJSON = (type) => /^application\/(.+\+)?json\b/.test(type);
  const isPicture = (type) => type.startsWith("image/");

  function pictureOf(data) {
    pictures.push(URL.createObjectURL(data));
    return pictures.at(-1);
  }

  // The pipelines of the document, and the examples of their bodies.

  async function load() {
    tell("");
    const response = await fetch(`${root}/openapi.json`, { headers: authorization() });
    byID("ask").hidden = response.status !== 401;
    if (response.status === 401) {
      byID("token").focus();
      tell(token === "" ? "" : "The gateway does not know this token.");
      return;
    }
    const document = await response.json();
    if (!response.ok) {
      throw new Error(document.error?.message ?? response.statusText);
    }
    for (const { post } of Object.values(document.paths)) {
      const spec = post?.["x-stagemesh"];
      if (spec) {
        pipelines.set(spec.pipeline, { spec, about: post.summary ?? "", examples: examplesOf(post.requestBody.content) });
      }
    }
    byID("pipeline").replaceChildren(...[...pipelines.keys()].map((name) => make("option", { value: name, textContent: name })));
    byID("content").hidden = false;
    if (pipelines.size === 0) {
      tell("The gateway serves no pipeline.");
      return;
    }
    const wanted = decodeURIComponent(location.hash.slice(1));
    byID("pipeline").value = pipelines.has(wanted) ? wanted : pipelines.keys().next().value;
    choose();
  }

  function examplesOf(content) {
    const out = [];
    for (const [type, { examples }] of Object.entries(content)) {
      for (const [name, { value, "x-stagemesh-base64": base64 }] of Object.entries(examples ?? {})) {
        out.push({ name, type, value, base64 });
      }
    }
    return out;
  }

  // The form.

  function choose() {
    const { spec, about, examples } = pipelines.get(byID("pipeline").value);
    history.replaceState(null, "", `#${encodeURIComponent(spec.pipeline)}`);
    byID("about").textContent = about;
    const parts = spec.inputs ?? [{ name: "", any: true, description: "The gateway does not know yet what the first stage takes." }];
    fields = parts.map(field);
    byID("inputs").replaceChildren(...fields.map((one) => one.element));
    const usable = examples.filter((one) => fill(one, true));
    byID("examples").replaceChildren("Examples: ", ...usable.map((one) => make("button", { type: "button", textContent: one.name, onclick: () => { fill(one, false); write(); } })));
    byID("examples").hidden = usable.length === 0;
    if (usable.length > 0 && usable[0].base64 === undefined) {
      fill(usable[0], false);
    }
    byID("answer").hidden = true;
    tell("");
    write();
  }

  function kindOf(part) {
    if (part.datatype) {
      return "tensor";
    }
    const types = part.content_types ?? [];
    if (types.length === 0 || types.some((type) => type.startsWith("text/"))) {
      return "text";
    }
    return types.some(isJSON) ? "json" : "file";
  }

  // field returns the part of the form for an input, with its value.
  function field(part) {
    const kind = kindOf(part);
    const types = part.content_types ?? [];
    const out = { part, kind, type: types[0] ?? "text/plain", file: null };
    const shape = part.shape ? `[${part.shape.map((n) => (n < 0 ? "any" : n)).join(", ")}]` : "";
    const hint = [part.datatype && `${part.datatype} ${shape}, as lists of JSON`, types.join(", "), part.optional && "optional", part.description].filter(Boolean).join("; ");
    out.element = make("fieldset", {}, make("legend", { textContent: part.name || "input" }), make("p", { className: "hint", textContent: hint }));
    if (kind === "file") {
      const input = make("input", { type: "file", accept: types.join(",") });
      const preview = make("div", { className: "picture" });
      const area = make("label", { className: "drop" }, "Drop a file here, or choose one: ", input);
      const take = (file) => {
        out.file = file;
        out.type = file?.type || types[0];
        preview.replaceChildren(...(file && isPicture(out.type) ? [make("img", { alt: file.name, src: pictureOf(file) })] : []));
        write();
      };
      // The code below reads the file, so it can be saved.
      out.takeExample = (file) => {
        input.value = "";
        take(file);
        preview.append(make("a", { download: file.name, href: pictureOf(file), textContent: `Save ${file.name}` }));
      };
      input.addEventListener("change", () => take(input.files[0] ?? null));
      for (const [event, over] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
        area.addEventListener(event, (e) => {
          e.preventDefault();
          area.classList.toggle("over", over);
        });
      }
      area.addEventListener("drop", (e) => {
        input.files = e.dataTransfer.files;
        take(e.dataTransfer.files[0] ?? null);
      });
      out.element.append(area, preview);
      return out;
    }
    out.area = make("textarea", { spellcheck: false, ariaLabel: part.name || "input", value: kind === "tensor" ? zeros(part) : "" });
    out.area.addEventListener("input", write);
    out.element.append(out.area);
    return out;
  }

  // zeros returns a small tensor of the shape that a part has, as JSON; "" for a large one.
  function zeros(part) {
    const shape = (part.shape ?? []).map((n) => (n < 0 ? 1 : n));
    if (part.optional || shape.reduce((all, n) => all * n, 1) > 64) {
      return "";
    }
    const zero = { BOOL: false, BYTES: "" }[part.datatype] ?? 0;
    const list = (axes) => (axes.length === 0 ? zero : Array.from({ length: axes[0] }, () => list(axes.slice(1))));
    return JSON.stringify(list(shape));
  }

  // fill fills the form from an example of a body, or only reports whether it can.
  function fill(example, only) {
    const texts = new Map();
    const { value, type, base64 } = example;
    if (base64 !== undefined) {
      const can = fields.length === 1 && fields[0].kind === "file";
      if (can && !only) {
        fields[0].takeExample(new File([Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0))], `example.${type.split(/[/+;]/)[1]}`, { type }));
      }
      return can;
    }
    if (Array.isArray(value?.inputs) && value.inputs[0]?.datatype) {
      value.inputs.forEach((one) => texts.set(one.name, JSON.stringify(nested(one.data, one.shape))));
    } else if (fields.length === 1 && fields[0].kind === "json" && isJSON(type)) {
      texts.set(fields[0].part.name, JSON.stringify(value, null, 2));
    } else if (fields.length === 1 && fields[0].kind === "text" && typeof value === "string") {
      texts.set(fields[0].part.name, value);
    }
    const can = texts.size > 0 && [...texts.keys()].every((name) => fields.some((one) => one.area && one.part.name === name));
    if (can && !only) {
      fields.filter((one) => one.area).forEach((one) => { one.area.value = texts.get(one.part.name) ?? ""; });
    }
    return can;
  }

  // nested returns flat data as lists of a shape.
  function nested(data, shape) {
    if (Array.isArray(data[0]) || shape.length < 2) {
      return data;
    }
    const size = data.length / shape[0];
    return Array.from({ length: shape[0] }, (_, i) => nested(data.slice(i * size, (i + 1) * size), shape.slice(1)));
  }

  // values returns the inputs that are given: {name, kind, type, data, datatype}.
  function values() {
    const out = [];
    for (const { part, kind, type, file, area } of fields) {
      const text = area?.value ?? "";
      const isMissing = kind === "file" ? file === null : text.trim() === "" && kind !== "text";
      if (isMissing || (kind === "text" && text === "" && part.optional)) {
        if (!part.optional) {
          throw new Error(`The input ${part.name || "of the pipeline"} is required.`);
        }
        continue;
      }
      const one = { name: part.name, kind, type, datatype: part.datatype, data: file ?? text };
      if (kind === "tensor" || kind === "json") {
        try {
          one.value = parse(text);
        } catch (error) {
          throw new Error(`The input ${part.name} is not JSON: ${error.message}`);
        }
      }
      out.push(one);
    }
    if (out.length === 0) {
      throw new Error("Give at least one input.");
    }
    return out;
  }

  // message returns the body of a request, and its type where the browser does not know it.
  function message(parts) {
    if (isAlone(parts)) {
      return { type: parts[0].type, body: parts[0].data };
    }
    if (isDocument(parts)) {
      return { type: "application/json", body: stringify(byName(parts)) };
    }
    if (parts.some((one) => one.kind === "tensor")) {
      throw new Error("This page sends tensors beside text alone; the code below sends this request.");
    }
    const form = new FormData();
    for (const one of parts) {
      form.append(one.name, new Blob([one.data], { type: one.type }), one.data.name ?? one.name);
    }
    return { body: form };
  }

  // isAlone reports whether the body is the one input, which needs no name.
  const isAlone = (parts) => fields.length === 1 && parts.length === 1 && parts[0].kind !== "tensor";

  // isDocument reports whether the body is JSON with the inputs by name: tensors have no other form here.
  const isDocument = (parts) => parts.some((one) => one.kind === "tensor") && parts.every((one) => one.kind === "tensor" || one.kind === "text");

  // parse and stringify keep integers that a double cannot hold, in browsers that support it.
  const parse = (text) => JSON.parse(text, (_, value, context) => (Number.isInteger(value) && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source ?? "") ? BigInt(context.source) : value));
  const stringify = (value, indent) => JSON.stringify(value, (_, one) => (typeof one === "bigint" ? JSON.rawJSON(String(one)) : one), indent);

  const byName = (parts) => Object.fromEntries(parts.map((one) => [one.name, one.value ?? one.data]));

  // The request.

  async function send() {
    sent?.abort();
    const controller = new AbortController();
    sent = controller;
    tell("");
    byID("stop").hidden = false;
    try {
      const { spec } = pipelines.get(byID("pipeline").value);
      const parts = values();
      const { type, body } = message(parts);
      const headers = { Accept: spec.stream ? "text/event-stream" : "application/json", ...authorization(), ...(type ? { "Content-Type": type } : {}) };
      const begin = performance.now();
      const response = await fetch(urlOf(spec), { method: "POST", headers, body, signal: controller.signal });
      if (!response.ok) {
        const { error } = await response.json();
        throw new Error(`${error.reason ?? response.status}: ${error.message}${(error.violations ?? []).map((v) => `\n${v.field}: ${v.description}`).join("")}`);
      }
      const answer = spec.stream ? await follow(response) : parse(await response.text());
      show(answer, parts, performance.now() - begin);
    } catch (error) {
      if (!controller.signal.aborted) {
        tell(error.message);
      }
    } finally {
      if (sent === controller) {
        byID("stop").hidden = true;
      }
    }
  }

  const urlOf = (spec) => `${root}/v1/pipelines/${spec.pipeline.split("/").map(encodeURIComponent).join("/")}:${spec.stream ? "stream" : "infer"}`;

  // follow shows the chunks of a streamed answer, and returns the whole.
  async function follow(response) {
    const shown = make("pre", { textContent: "" });
    byID("outputs").replaceChildren(shown);
    byID("timeline").replaceChildren();
    byID("answer").hidden = false;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = "", piece; !(piece = await reader.read()).done;) {
      const events = (text + piece.value).split("\n\n");
      text = events.pop();
      for (const event of events) {
        const { name, data } = event.match(/^event: (?<name>.*)\ndata: (?<data>.*)/m)?.groups ?? {};
        const value = data && parse(data);
        if (name === "chunk" && shown.textContent.length < shownText) {
          shown.append(value.outputs.map((one) => one.text ?? stringify(one.json ?? one.data ?? null)).join(" "));
        } else if (name === "error") {
          throw new Error(`${value.error.reason}: ${value.error.message}`);
        } else if (name === "done") {
          return value;
        }
      }
    }
    throw new Error("The stream ended before its answer.");
  }

  // The answer.

  function show(answer, parts, took) {
    const picture = parts.find((one) => one.kind === "file" && isPicture(one.type));
    byID("outputs").replaceChildren(...answer.outputs.flatMap((one) => [make("h3", { textContent: one.name || "output" }), output(one, answer.outputs, picture)]));
    timeline(answer.timeline, took);
    byID("answer").hidden = false;
  }

  // output shows one output as what it seems to be.
  function output(one, all, picture) {
    if (one.data_base64 !== undefined && isPicture(one.content_type)) {
      const bytes = Uint8Array.from(atob(one.data_base64), (c) => c.charCodeAt(0));
      return make("div", { className: "picture" }, make("img", { alt: one.name, src: pictureOf(new Blob([bytes], { type: one.content_type })) }));
    }
    if (one.datatype === undefined) {
      const text = one.text ?? (one.json !== undefined ? stringify(one.json, 2) : `${one.content_type}, ${Math.floor(one.data_base64.length * 3 / 4)} bytes`);
      return make("pre", { textContent: cut(text) });
    }
    const numbers = one.data.flat(Infinity);
    const isBoxes = picture && /box/i.test(one.name) && one.shape.at(-1) === 4;
    if (isBoxes) {
      return boxes(numbers, picture.data);
    }
    const labels = all.find((other) => other !== one && other.datatype === "BYTES" && String(other.shape) === String(one.shape));
    const isScores = /^(FP|BF)/.test(one.datatype) && numbers.length > 1 && numbers.length <= shownBars && numbers.every((n) => n >= 0 && n <= 1);
    if (isScores) {
      return bars(numbers, labels?.data.flat(Infinity));
    }
    const head = `${one.datatype} [${one.shape.join(", ")}]`;
    const rest = numbers.length > shownElements ? `\nand ${numbers.length - shownElements} more elements` : "";
    const list = numbers.length > shownElements ? numbers.slice(0, shownElements) : nested(numbers, one.shape);
    return make("pre", { textContent: cut(`${head}\n${stringify(list)}${rest}`) });
  }

  const cut = (text) => (text.length > shownText ? `${text.slice(0, shownText)}\nand ${text.length - shownText} more characters` : text);

  function bars(numbers, labels) {
    const rows = numbers.map((n, i) => {
      const bar = make("div", { className: "bar" });
      bar.style.width = `${100 * n}%`;
      return make("tr", {}, make("th", { textContent: labels?.[i] ?? i }), make("td", { textContent: n.toPrecision(3) }), make("td", {}, bar));
    });
    return make("table", { className: "bars" }, ...rows);
  }

  // boxes draws boxes of x, y, x, y in pixels, or in parts of the picture if none is above 1.
  function boxes(numbers, file) {
    const image = make("img", { alt: "", src: pictureOf(file) });
    const out = make("div", { className: "picture" }, image);
    image.addEventListener("load", () => {
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      const isPart = numbers.every((n) => n <= 1);
      svg.setAttribute("viewBox", isPart ? "0 0 1 1" : `0 0 ${image.naturalWidth} ${image.naturalHeight}`);
      svg.setAttribute("preserveAspectRatio", "none");
      for (let i = 0; i + 3 < Math.min(numbers.length, 4 * shownElements); i += 4) {
        const [x, y, right, bottom] = numbers.slice(i, i + 4);
        const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
        Object.entries({ x, y, width: Math.max(0, right - x), height: Math.max(0, bottom - y) }).forEach(([key, value]) => rect.setAttribute(key, value));
        svg.append(rect);
      }
      out.append(svg);
    });
    return out;
  }

  // timeline draws the branches and steps of an answer, each step's waits before its run.
  function timeline({ total_ms: total, steps, branches = [] }, took) {
    const ends = new Map(); // by path: where the next step begins
    const row = (name, about, ...pieces) => {
      const track = make("div", { className: "track" });
      for (const [className, begin, size, title] of pieces.filter((piece) => piece[2] > 0)) {
        const piece = make("span", { className, title: `${title}: ${size.toFixed(2)} ms` });
        piece.style.left = `${(100 * begin) / total}%`;
        piece.style.width = `${(100 * size) / total}%`;
        track.append(piece);
      }
      return make("tr", {}, make("th", { textContent: name }), make("td", { textContent: about }), make("td", {}, track));
    };
    const rows = branches.map((b) => {
      ends.set(b.path, b.began_ms);
      return row(b.path, `${b.status}${b.why ? `: ${b.why}` : ""}, ${b.took_ms.toFixed(2)} ms`, ["branch", b.began_ms, b.took_ms, b.path]);
    });
    let known = 0;
    for (const s of steps) {
      const path = s.path ?? "";
      const at = ends.get(path) ?? (path === "" ? known : 0);
      const run = at + s.queue_wait_ms + s.batch_wait_ms;
      ends.set(path, run + s.run_ms);
      known = Math.max(known, run + s.run_ms);
      rows.push(row(s.step, `queue ${s.queue_wait_ms.toFixed(2)}, batch ${s.batch_wait_ms.toFixed(2)}, run ${s.run_ms.toFixed(2)} ms; batch of ${s.batch_size}`,
        ["queue", at, s.queue_wait_ms, "queue"], ["batch", at + s.queue_wait_ms, s.batch_wait_ms, "batch"], ["run", run, s.run_ms, "run"]));
    }
    rows.push(row("gateway and hops", `${Math.max(0, total - known).toFixed(2)} ms`, ["rest", known, Math.max(0, total - known), "gateway and hops"]));
    rows.push(row("whole answer", `${total.toFixed(2)} ms; with network and browser ${took.toFixed(2)} ms`));
    byID("timeline").replaceChildren(...rows);
  }

  // The same call in code.

  function write() {
    const { spec } = pipelines.get(byID("pipeline").value);
    let parts;
    try {
      parts = values();
    } catch (error) {
      byID("code").replaceChildren(make("p", { className: "hint", textContent: error.message }));
      return;
    }
    byID("code").replaceChildren(...[["curl", curl(spec, parts)], ["Python", python(spec, parts)], ["TypeScript", typescript(spec, parts)]].flatMap(([name, text]) => {
      const block = make("pre", { id: `code-${name.toLowerCase()}`, textContent: text });
      const copy = make("button", { type: "button", textContent: "Copy" });
      copy.addEventListener("click", async () => {
        try {
          await navigator.clipboard.writeText(text);
          copy.textContent = "Copied";
        } catch {
          getSelection().selectAllChildren(block); // without TLS there is no clipboard
        }
      });
      return [make("div", { className: "copy" }, make("strong", { textContent: name }), copy), block];
    }));
  }

  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

  function curl(spec, parts) {
    const words = ["curl -sS"];
    if (spec.stream) {
      words[0] += " -N";
    }
    if (token !== "") {
      words.push('-H "Authorization: Bearer $STAGEMESH_TOKEN"');
    }
    if (isAlone(parts)) {
      const [{ kind, type, data }] = parts;
      words.push(`-H ${quoted(`Content-Type: ${type}`)}`, kind === "file" ? `--data-binary ${quoted(`@${data.name}`)}` : `--data-raw ${quoted(data)}`);
    } else if (isDocument(parts)) {
      words.push("-H 'Content-Type: application/json'", `--data-raw ${quoted(stringify(byName(parts)))}`);
    } else {
      for (const one of parts) {
        const value = one.kind === "file" ? `@"${one.data.name}"` : `"${one.data.replace(/[\\"]/g, "\\$&")}"`;
        words.push(`-F ${quoted(`${one.name}=${value};type=${one.type}`)}`);
      }
    }
    return `${words.join(" \\\n  ")} \\\n  ${quoted(urlOf(spec))}\n`;
  }

  // literal returns a value of JSON in Python or TypeScript.
  function literal(value, isPython) {
    if (Array.isArray(value)) {
      return `[${value.map((one) => literal(one, isPython)).join(", ")}]`;
    }
    if (value !== null && typeof value === "object") {
      return `{${Object.entries(value).map(([key, one]) => `${JSON.stringify(key)}: ${literal(one, isPython)}`).join(", ")}}`;
    }
    if (typeof value === "bigint") {
      return isPython ? String(value) : `${value}n`;
    }
    const names = isPython && new Map([[null, "None"], [true, "True"], [false, "False"]]).get(value);
    return names || JSON.stringify(value);
  }

  // extents returns the shape of nested lists.
  const extents = (value) => (Array.isArray(value) ? [value.length, ...(value.length > 0 ? extents(value[0]) : [])] : []);

  function python(spec, parts) {
    const value = (one) => ({
      file: () => `open(${JSON.stringify(one.data.name)}, "rb")`,
      text: () => JSON.stringify(one.data),
      json: () => literal(one.value, true),
      tensor: () => `Tensor(${literal(one.value, true)}, "${one.datatype}")`,
    })[one.kind]();
    const isWord = (name) => /^[A-Za-z_]\w*$/.test(name) && !/^(pipeline|self|inputs|class|def|for|from|if|import|in|is|lambda|not|or|and|as|pass|return|with|None|True|False)$/.test(name);
    const args = parts.every((one) => isWord(one.name)) ? parts.map((one) => `${one.name}=${value(one)}`).join(", ")
      : `{${parts.map((one) => `${JSON.stringify(one.name)}: ${value(one)}`).join(", ")}}`;
    const call = `(${JSON.stringify(spec.pipeline)}, ${args})`;
    // Chunks of a single text output are printed as running text, other chunks with the names of their outputs.
    const isText = spec.outputs?.length === 1 && !spec.outputs[0].optional && kindOf(spec.outputs[0]) === "text";
    const printing = isText ? 'print(chunk.value, end="", flush=True)' : "print(chunk)";
    return [
      token === "" ? "" : "import os\n\n",
      `from stagemesh.client import Mesh${parts.some((one) => one.kind === "tensor") ? ", Tensor" : ""}\n\n`,
      `mesh = Mesh(${JSON.stringify(root)}${token === "" ? "" : ', token=os.environ["STAGEMESH_TOKEN"]'})\n`,
      spec.stream ? `with mesh.stream${call} as stream:\n    for chunk in stream:\n        ${printing}\nprint(stream.answer)\n` : `print(mesh.infer${call})\n`,
    ].join("");
  }

  function typescript(spec, parts) {
    const value = (one) => ({
      file: () => `await readFile(${JSON.stringify(one.data.name)})`,
      text: () => JSON.stringify(one.data),
      json: () => literal(JSON.parse(one.data), false), // the client takes no bigint in a document
      tensor: () => `new Tensor("${one.datatype}", ${literal([one.value].flat(Infinity), false)}, ${literal(extents(one.value), false)})`,
    })[one.kind]();
    const call = `(${JSON.stringify(spec.pipeline)}, {${parts.map((one) => ` ${JSON.stringify(one.name)}: ${value(one)}`).join(",")} })`;
    return [
      parts.some((one) => one.kind === "file") ? 'import { readFile } from "node:fs/promises";\n' : "",
      `import { Mesh${parts.some((one) => one.kind === "tensor") ? ", Tensor" : ""} } from "@stagemesh/client";\n\n`,
      `const mesh = new Mesh(${JSON.stringify(root)}${token === "" ? "" : ", { token: process.env.STAGEMESH_TOKEN }"});\n`,
      spec.stream ? `const stream = mesh.stream${call};\nfor await (const chunk of stream) {\n  console.log(String(chunk));\n}\nconsole.log(String(stream.answer));\n`
        : `const answer = await mesh.infer${call};\nconsole.log(String(answer));\n`,
    ].join("");
  }

  const start = () => load().catch((error) => tell(`The gateway does not say what it serves: ${error.message}`));
  byID("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    token = byID("token").value.trim();
    byID("token").value = "";
    start();
  });
  byID("pipeline").addEventListener("change", () => {
    sent?.abort();
    pictures.forEach(URL.revokeObjectURL);
    pictures = [];
    choose();
  });
  byID("form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byID("stop").addEventListener("click", () => sent?.abort());
  start();
})();
