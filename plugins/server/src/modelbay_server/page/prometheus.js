// Prometheus' text format, as far as a page needs it: samples with their labels.

const SAMPLE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const NUMBERS = { "+Inf": Infinity, "-Inf": -Infinity, NaN: NaN };

/** Every sample of a text: `{ name, labels, value }`. */
export function parse(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries([...(match[2] ?? "").matchAll(LABEL)].map(([, name, value]) => [name, unescaped(value)]));
    samples.push({ name: match[1], labels, value: NUMBERS[match[3]] ?? Number(match[3]) });
  }
  return samples;
}

function unescaped(value) {
  return value.replace(/\\(.)/g, (_, character) => (character === "n" ? "\n" : character));
}
