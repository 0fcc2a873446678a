// Shows hosts, models and aliases by the services of the admin port, and again every few
// seconds. A token is kept in the page's memory alone.
"use strict";

(() => {
  const refreshAfter = 5000;
  const shown = 100;
  const byID = (id) => document.getElementById(id);
  let token = "";
  let timer;
  let loads = 0;

  async function call(method, request) {
    const headers = { "Content-Type": "application/json" };
    if (token !== "") {
      headers.Authorization = `Bearer ${token}`;
    }
    const response = await fetch(`/stagemesh.admin.v1.${method}`, { method: "POST", headers, body: JSON.stringify(request) });
    const answer = await response.json();
    if (!response.ok) {
      throw Object.assign(new Error(answer.message), { isToken: response.status === 401 });
    }
    return answer;
  }

  function table(id, heads, rows) {
    const line = (kind, cells) => {
      const out = document.createElement("tr");
      out.append(...cells.map((text) => Object.assign(document.createElement(kind), { textContent: text })));
      return out;
    };
    byID(id).replaceChildren(line("th", heads), ...rows.map((row) => line("td", row)));
  }

  function age(at) {
    const seconds = Math.max(0, Math.round((Date.now() - Date.parse(at)) / 1000));
    const [name, size] = [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]].find(([, n]) => seconds >= n) ?? ["s", 1];
    return at === undefined ? "" : `${Math.floor(seconds / size)}${name} ago`;
  }

  function fill(used, capacity) {
    const part = (kind) => Number(capacity?.[kind] ?? 0) > 0 &&
      `${Math.round((100 * Number(used?.[kind] ?? 0)) / Number(capacity[kind]))} % of ${Math.round(Number(capacity[kind]) / 2 ** 20)} MiB ${kind}`;
    return ["host", "device"].map(part).filter(Boolean).join(", ");
  }

  const lower = (state, prefix) => (state ?? "").replace(prefix, "").replaceAll("_", " ").toLowerCase();
  const replica = (r) => `${r.host} ${lower(r.state, "REPLICA_STATE_")}${r.message ? `: ${r.message}` : ""}`;

  async function load() {
    const own = ++loads;
    const [hosts, models, aliases] = await Promise.all([
      call("MeshService/ListHosts", {}),
      call("ModelService/ListModels", { latest: true, idPrefix: byID("prefix").value, pageSize: shown }),
      call("ModelService/ListAliases", { pageSize: shown }),
    ]);
    if (own !== loads) {
      return; // a later one has begun
    }
    table("hosts", ["Stage", "Host", "State", "Models", "Memory", "Loading", "Queued", "Oldest use"],
      (hosts.hosts ?? []).filter((h) => h.record.cache).map(({ record: r, alive }) => [
        r.stage, r.host, alive ? (r.draining ? "draining" : "alive") : "dead", r.cache.models ?? 0, fill(r.cache.used, r.cache.capacity),
        r.cache.loading ?? 0, r.cache.queued ?? 0, age(r.cache.oldestUse)]));
    table("models", ["ID", "Stage", "Type", "State", "Last use", "Replicas"],
      (models.models ?? []).map((m) => [m.model.id, m.model.stage, m.model.type ?? "", lower(m.state, "MODEL_STATE_"),
        Date.parse(m.lastUse) < Date.parse(m.registeredAt) ? "not yet" : age(m.lastUse),
        (m.replicas ?? []).map(replica).join(", ")]));
    table("aliases", ["Name", "Model", "Next", "Owner"],
      (aliases.aliases ?? []).map((a) => [a.name, a.active?.model ?? "", a.target?.model ?? "", a.owner ?? ""]));
  }

  async function refresh() {
    clearTimeout(timer);
    let problem = "";
    try {
      await load();
      byID("content").hidden = false;
      byID("ask").hidden = true;
    } catch (error) {
      problem = error.isToken && token === "" ? "" : error.message;
      byID("ask").hidden = !error.isToken;
    }
    byID("problem").textContent = problem;
    byID("problem").hidden = problem === "";
    clearTimeout(timer);
    if (byID("ask").hidden) {
      timer = setTimeout(refresh, refreshAfter);
    }
  }

  byID("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    token = byID("token").value.trim();
    byID("token").value = "";
    refresh();
  });
  byID("prefix").addEventListener("input", refresh);
  refresh();
})();
