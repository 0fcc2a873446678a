// Shows the gateway's own document. Where the gateway wants a token, the page asks
// for one, and keeps it in its memory alone.
"use strict";

(() => {
  // The viewer draws a document of many operations slowly: they are closed, and
  // found by a filter.
  const many = 64;

  const ask = document.getElementById("ask");
  const field = document.getElementById("token");
  const problem = document.getElementById("problem");

  function tell(text) {
    problem.textContent = text;
    problem.hidden = text === "";
  }

  function show(spec, token) {
    const large = Object.keys(spec.paths).length > many;
    document.title = spec.info.title;
    const viewer = window.SwaggerUIBundle({
      spec,
      dom_id: "#document",
      deepLinking: true,
      displayRequestDuration: true,
      docExpansion: large ? "none" : "list",
      filter: large,
      defaultModelsExpandDepth: -1,
      validatorUrl: null,
      onComplete: () => {
        if (token !== "") {
          viewer.preauthorizeApiKey("token", token);
        }
      },
    });
  }

  async function load(token) {
    tell("");
    const headers = token === "" ? {} : { Authorization: `Bearer ${token}` };
    const response = await fetch("openapi.json", { headers });
    if (response.status === 401) {
      ask.hidden = false;
      field.value = "";
      field.focus();
      tell(token === "" ? "" : "The gateway does not know this token.");
      return;
    }
    const answer = await response.json();
    if (!response.ok) {
      throw new Error(answer.error?.message ?? response.statusText);
    }
    ask.hidden = true;
    field.value = "";
    show(answer, token);
  }

  function start(token) {
    load(token).catch((error) => tell(`The gateway does not say what it serves: ${error.message}`));
  }

  ask.addEventListener("submit", (event) => {
    event.preventDefault();
    start(field.value.trim());
  });
  start("");
})();
