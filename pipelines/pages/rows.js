"use strict";
// Texts of others become text nodes alone, never markup: the page's policy refuses anything else.
const PAGE_ROWS = 20;
const LONG = 1200;
const HIDDEN = /(?![\n\t\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu;
const USAGE = {
  prompt_tokens: "prompt tokens", completion_tokens: "answer tokens", cached_tokens: "found in the cache",
  search_tokens: "tokens of the search", queue_ms: "waiting, ms", first_token_ms: "first token, ms",
  total_ms: "in all, ms", replica: "replica", attempt: "attempt", is_deduplicated: "an equal row's answer",
  is_carried: "an earlier run's answer",
};
const rows = JSON.parse(document.getElementById("rows").textContent);
const form = document.getElementById("filters");
let shown = rows;
let page = 0;

function make(name, className, ...children) {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

// What hides or turns text round is shown by its number.
function seen(text) {
  const parts = document.createDocumentFragment();
  let from = 0;
  for (const found of text.matchAll(HIDDEN)) {
    parts.append(text.slice(from, found.index));
    const number = found[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    parts.append(make("span", "hidden-char", `U+${number}`));
    from = found.index + found[0].length;
  }
  parts.append(text.slice(from));
  return parts;
}

function block(text) {
  const pre = make("pre", "", seen(text));
  pre.dir = "auto";
  if (text.length <= LONG && text.split("\n").length <= 14) return pre;
  const box = make("div", "cut", pre);
  const button = make("button", "", `Show ${text.length.toLocaleString("en")} characters`);
  button.type = "button";
  button.addEventListener("click", () => { box.classList.remove("cut"); button.remove(); });
  box.append(button);
  return box;
}

function folded(title, ...children) {
  return make("details", "", make("summary", "", title), ...children);
}

function percent(logprob) {
  return logprob === null ? "–" : `${(100 * Math.exp(logprob)).toFixed(1)} %`;
}

function heat(logprob) {
  const likely = logprob === null ? 1 : Math.exp(logprob);
  return [0.9, 0.5, 0.2, 0.05].filter((edge) => likely <= edge).length;
}

function tokens(list) {
  const pre = make("pre", "");
  pre.dir = "auto";
  const table = make("table", "", make("thead", "", make("tr", "",
    ...["token", "probability", "log-probability", "likeliest there"].map((name) => make("th", "", name)))));
  const body = make("tbody", "");
  for (const [token, logprob, tops] of list) {
    const span = make("span", `token heat${heat(logprob)}`, seen(token));
    const likeliest = tops.map(([text, value]) => `${JSON.stringify(text)} ${percent(value)}`).join(", ");
    span.title = `${percent(logprob)}${likeliest ? `; likeliest: ${likeliest}` : ""}`.replace(HIDDEN, "\ufffd");
    pre.append(span);
    body.append(make("tr", "", make("td", "text", seen(JSON.stringify(token))), make("td", "n", percent(logprob)),
      make("td", "n", logprob === null ? "–" : logprob.toFixed(3)), make("td", "text", seen(likeliest))));
  }
  table.append(body);
  return [pre, folded(`${list.length} tokens as a table`, make("div", "scroll", table))];
}

function facts(entries) {
  const list = make("dl", "facts");
  for (const [name, value] of entries) {
    const told = typeof value === "number" ? value.toLocaleString("en") : String(value === true ? "yes" : value);
    list.append(make("dt", "", name), make("dd", "", seen(told)));
  }
  return list;
}

function choice(one, number, many) {
  const parts = [make("p", "who", many ? `answer ${number + 1}` : "answer")];
  if (one.reasoning) parts.push(folded("reasoning", block(one.reasoning)));
  if (one.tokens) parts.push(...tokens(one.tokens));
  else parts.push(block(one.text ?? ""));
  if (one.tool_calls) parts.push(folded("tool calls", block(one.tool_calls)));
  if (one.score !== undefined) parts.push(facts([["score", one.score]]));
  return parts;
}

function badge(text, isBad) {
  return make("span", isBad ? "badge bad" : "badge", seen(String(text)));
}

function article(row) {
  const place = row.line === null ? row.file : `${row.file}:${row.line}`;
  const header = make("header", "", make("h2", "", seen(row.id)));
  if (place !== row.id) header.append(badge(place));
  const parts = [header];
  if (row.kind === "error") {
    header.append(badge(row.reason, true), badge(row.status_code, true), badge(row.stage));
    const message = make("p", "text", seen(row.message));
    message.dir = "auto";
    parts.push(message);
    parts.push(facts([["field", row.param ?? "–"], ["type", row.type], ["tried", row.attempts]]));
    if (row.request !== null) parts.push(make("p", "who", "line"), block(row.request));
  } else {
    header.append(badge(row.model));
    for (const reason of new Set(row.choices.map((one) => one.finish_reason ?? "none"))) header.append(badge(reason));
    header.append(badge(`${row.usage.completion_tokens.toLocaleString("en")} tokens`));
    header.append(badge(`${Math.round(row.usage.total_ms).toLocaleString("en")} ms`));
    for (const [who, text] of row.prompt) parts.push(make("p", "who", seen(who ? `prompt: ${who}` : "prompt")), block(text));
    row.choices.forEach((one, number) => parts.push(...choice(one, number, row.choices.length > 1)));
    const usage = Object.entries(row.usage).map(([name, value]) => [USAGE[name], value]);
    parts.push(folded("Usage", facts([["created", row.created], ["endpoint", row.endpoint], ...usage])));
    if (row.extra) parts.push(folded("Own columns", block(row.extra)));
    parts.push(folded("Request", block(row.request)), folded("Response", block(row.response)));
  }
  if (row.more) parts.push(make("p", "note", "Parts of this row are cut. All of it: ", make("code", "", seen(row.more))));
  return make("article", "", ...parts);
}

function texts(row) {
  if (row.kind === "error") return [row.message, row.request ?? ""];
  return [row.request, ...row.prompt.map((one) => one[1]), ...row.choices.map((one) => one.text ?? "")];
}

function matches(row, asked) {
  const has = (text) => text.toLowerCase().includes(asked.contains.toLowerCase());
  return (!asked.kind || row.kind === asked.kind)
    && (!asked.id || `${row.id} ${row.file}:${row.line}`.toLowerCase().includes(asked.id.toLowerCase()))
    && (!asked.reason || row.reason === asked.reason)
    && (!asked.model || row.model === asked.model)
    && (!asked.finish_reason || (row.choices ?? []).some((one) => one.finish_reason === asked.finish_reason))
    && (!asked.contains || texts(row).some(has));
}

function choose() {
  const asked = Object.fromEntries(new FormData(form));
  shown = rows.filter((row) => matches(row, asked));
  if (asked.sort) shown.sort((a, b) => (b.usage?.[asked.sort] ?? -1) - (a.usage?.[asked.sort] ?? -1));
  page = 0;
  draw();
}

function draw() {
  const from = page * PAGE_ROWS;
  const here = shown.slice(from, from + PAGE_ROWS);
  document.getElementById("list").replaceChildren(...here.map(article));
  document.getElementById("where").textContent = shown.length
    ? `${from + 1}–${from + here.length} of ${shown.length}` : "no row of this page is like that";
  document.getElementById("previous").disabled = page === 0;
  document.getElementById("next").disabled = from + PAGE_ROWS >= shown.length;
}

function offer(name, values) {
  for (const value of [...new Set(values)].filter((one) => one !== undefined && one !== null).sort()) {
    const option = make("option", "", seen(value));
    option.value = value;
    form.elements[name].append(option);
  }
}

offer("finish_reason", rows.flatMap((row) => (row.choices ?? []).map((one) => one.finish_reason)));
offer("reason", rows.map((row) => row.reason));
offer("model", rows.map((row) => row.model));
document.getElementById("legend").hidden = !rows.some((row) => (row.choices ?? []).some((one) => one.tokens));
form.addEventListener("input", choose);
form.addEventListener("submit", (event) => event.preventDefault());
for (const [name, step] of [["previous", -1], ["next", 1]]) {
  document.getElementById(name).addEventListener("click", () => { page += step; draw(); window.scrollTo(0, 0); });
}
draw();
