// Runs the dashboard's script with a document of its own in place of a browser's. Reads {script, ids, status} as JSON
// from its input; once the page has drawn the status, writes {title, pause, elements} with all elements that have an id.
"use strict";
const fs = require("node:fs"), vm = require("node:vm");
const given = JSON.parse(fs.readFileSync(0, "utf8"));

class Element {
  constructor(tag) { Object.assign(this, {tag, className: "", hidden: false, style: {}, attributes: {}, children: [], own: ""}); }
  get textContent() { return this.own + this.children.map(child => child.textContent).join(""); }
  set textContent(text) { this.own = String(text); this.children = []; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  append(...nodes) { this.children.push(...nodes); }
  addEventListener() {}
  replaceChildren(...nodes) { this.own = ""; this.children = nodes; }
  toJSON() { return {tag: this.tag, attributes: this.attributes, text: this.textContent, hidden: this.hidden, name: this.className, children: this.children}; }
}

const elements = Object.fromEntries(given.ids.map(id => [id, new Element("")]));
const document = {
  title: "",
  createElement: tag => new Element(tag),
  createElementNS: (_, tag) => new Element(tag),
  getElementById: id => { if (!(id in elements)) throw new Error(`the page has no element ${id}`); return elements[id]; },
};
const fetch = async path => path.startsWith("status.json") ? {ok: true, json: async () => given.status} : {ok: false};
const setTimeout = (_, pause) => process.stdout.write(JSON.stringify({title: document.title, pause, elements}));
vm.runInNewContext(given.script, {document, fetch, location: {search: "", hash: given.hash || ""}, history: {replaceState() {}}, addEventListener() {}, URLSearchParams, setTimeout, AbortSignal: {timeout: () => null}});
