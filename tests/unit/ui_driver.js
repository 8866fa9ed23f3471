// Runs the page's own script on a minimal document, sends one message, and prints what is shown.
// Usage: node ui_driver.js PAGE ADDRESS TEXT
"use strict";
const fs = require("fs");
const [file, address, text] = process.argv.slice(2);
const script = fs.readFileSync(file, "utf8").split("<script>")[1].split("</script>")[0];

class Element {
  constructor() { this.children = []; this.listeners = {}; this.value = ""; this.className = ""; this.own = ""; }
  set textContent(text) { this.own = text; this.children = []; }
  get textContent() { return this.own + this.children.map(c => c.textContent).join(""); }
  append(...more) { this.children.push(...more); }
  replaceChildren(...more) {
    this.children = more;
    if (more.length && more[0].value) this.value = more[0].value;
  }
  addEventListener(name, call) { this.listeners[name] = call; }
}
const elements = {};
globalThis.document = {
  getElementById: id => (elements[id] = elements[id] || new Element()),
  createElement: () => new Element(),
};
globalThis.Option = class { constructor(label, value) { this.value = value; this.textContent = label; } };
const real = globalThis.fetch;
globalThis.fetch = (path, options) => real(address + "/" + path, options);

(0, eval)(script);

(async () => {
  const until = async state => { while (!state()) await new Promise(done => setTimeout(done, 5)); };
  await until(() => document.getElementById("model").children.length);
  Object.assign(document.getElementById("temperature"), {value: "0"});
  Object.assign(document.getElementById("tokens"), {value: "40"});
  Object.assign(document.getElementById("seed"), {value: "3"});
  elements.text.value = text;
  elements.form.listeners.submit({preventDefault() {}});
  await until(() => document.getElementById("send").disabled === false);
  const reply = elements.log.children.find(c => c.className === "turn reply");
  console.log(JSON.stringify({
    models: elements.model.children.map(c => c.value),
    turns: elements.log.children.map(c => c.className),
    reply: reply.textContent,
    guessed: reply.children.filter(c => c.className === "guess").length,
    tokens: reply.children.length,
    numbers: elements.numbers.textContent,
  }));
})();
