// Where answers come from: a server on this machine, data enclosed in the page, or a notebook's kernel.
import { decode } from "./arrays.js";
import { explainLocally } from "./local.js";

// Remember answers, so that going back costs nothing.
function remember(ask) {
  const known = new Map();
  return (question, args) => {
    const key = question + JSON.stringify(args);
    if (!known.has(key)) {
      if (known.size > 200) known.delete(known.keys().next().value);
      const answer = ask(question, args).then(decode);
      known.set(key, answer);
      answer.catch(() => known.delete(key));
    }
    return known.get(key);
  };
}

const CHANGING = new Set(["models", "job", "start", "stop", "follow", "runs"]);

export function served(base = "") {
  const ask = async (question, args) => {
    const reply = await fetch(`${base}/ask/${question}`, {
      method: "POST", headers: { "content-type": "application/json", "x-clearhead": "studio" }, body: JSON.stringify(args),
    });
    const data = await reply.json();
    if (!reply.ok) throw new Error(data.error || reply.statusText);
    return data;
  };
  const kept = remember(ask);
  return { live: true, kind: "served", ask: (question, args) => (CHANGING.has(question) ? ask(question, args).then(decode) : kept(question, args)) };
}

// The answers are a table: question -> [[arguments, answer], …]. An answer fits if its arguments do.
export function enclosed(answers) {
  const find = (question, args) => {
    for (const [given, answer] of answers[question] || [])
      if (Object.entries(given).every(([key, value]) => JSON.stringify(args[key]) === JSON.stringify(value))) return answer;
    return null;
  };
  const step = async (path, head) => {
    const found = find("step", { path, head });
    return found && { ...decode(found.values), heads: found.heads };
  };
  const ask = async (question, args) => {
    const found = find(question, args) || (question === "cell" && (await explainLocally(args.path, args.index, step, find("tokens", {}).labels)));
    if (!found) throw new Error("offline");
    return found;
  };
  return { live: false, kind: "enclosed", ask: remember(ask) };
}

// anywidget: questions go to the kernel as custom messages with a number, answers come back with it.
export function kernel(model) {
  const waiting = new Map();
  let last = 0;
  model.on("msg:custom", (message) => {
    const [accept, refuse] = waiting.get(message.id) || [];
    waiting.delete(message.id);
    if (!accept) return;
    if (message.error) refuse(new Error(message.error));
    else accept(message.answer);
  });
  const ask = (question, args) => new Promise((accept, refuse) => {
    const id = ++last;
    waiting.set(id, [accept, refuse]);
    model.send({ id, question, args });
  });
  const kept = remember(ask);
  return { live: true, kind: "kernel", ask: (question, args) => (CHANGING.has(question) ? ask(question, args).then(decode) : kept(question, args)) };
}
