// The arithmetic of attention from enclosed values, for pages without a server. The stages are those of the server.
const MOST = 24;
const top = (terms) => {
  if (terms.length <= MOST) return terms;
  const order = [...terms].sort((a, b) => Math.abs(b.value) - Math.abs(a.value)), rest = order.slice(MOST - 1);
  return [...order.slice(0, MOST - 1), { name: `${rest.length} smaller terms`, value: rest.reduce((sum, term) => sum + term.value, 0), factors: [], path: "", index: [] }];
};
const term = (name, value, factors = [], path = "", index = []) => ({ name, value, factors, path, index });
const stage = (formula, value, terms, operation = "Σ") => ({ formula, value, operation, terms });

// `step` gives the values of a step and a head: {shape, values}, or null where they are not enclosed
export async function explainLocally(path, index, step, labels) {
  const layer = path.slice(0, path.lastIndexOf(".")), kind = path.slice(layer.length + 1), [head, i, j] = index;
  const own = await step(path, index.length === 3 ? head : 0);
  if (!own || index.length !== 3) return own ? { path, index, value: own.values[index[0] * own.shape[1] + (index[1] || 0)], stages: [], python: "" } : null;
  const at = (array, r, c) => array.values[r * array.shape[1] + c], value = at(own, i, j);
  if (kind === "weights") {
    const scores = await step(`${layer}.scores`, head);
    if (!scores) return null;
    if (!(value > 0)) return { path, index, value, stages: [stage("the mask hides this key: weight 0", 0, [])], python: "" };
    const keys = [...own.values.keys()].slice(0, own.shape[1]).filter((k) => at(own, i, k) > 0), high = Math.max(...keys.map((k) => at(scores, i, k)));
    const powers = keys.map((k) => Math.exp(at(scores, i, k) - high)), total = powers.reduce((a, b) => a + b, 0), mine = Math.exp(at(scores, i, j) - high);
    return { path, index, value, python: "", stages: [
      stage("Σ_k exp(score_k − max)", total, top(keys.map((k, n) => term(`exp(${(at(scores, i, k) - high).toPrecision(3)}) for '${labels[k] || k}'`, powers[n], [["score", at(scores, i, k)]], `${layer}.scores`, [head, i, k])))),
      stage("exp(score − max) / Σ", mine / total, [term("exp(score − max)", mine, [], `${layer}.scores`, [head, i, j]), term("1/Σ", 1 / total)], "Π")] };
  }
  if (kind === "scores") {
    const rotated = await step(`${layer}.query_rotated`, head), name = rotated ? "_rotated" : "";
    const q = rotated || (await step(`${layer}.query`, head)), first = await step(`${layer}.key${name}`, 0);
    if (!q || !first) return null;
    const group = Math.floor(head / (q.heads / first.heads)), k = group ? await step(`${layer}.key${name}`, group) : first, width = q.shape[1];
    const products = Array.from({ length: width }, (_, d) => at(q, i, d) * at(k, j, d)), sum = products.reduce((a, b) => a + b, 0);
    return { path, index, value, python: "", stages: [
      stage("q·k = Σ_d q_d·k_d", sum, top(products.map((product, d) => term(`q[${d}]·k[${d}]`, product, [["q", at(q, i, d)], ["k", at(k, j, d)]], `${layer}.query${name}`, [head, i, d])))),
      stage(`÷ √${width}`, sum / Math.sqrt(width), [term("q·k", sum), term("1/√K", 1 / Math.sqrt(width))], "Π")] };
  }
  return { path, index, value, stages: [], python: "" };
}
