// Arrays that travel inside answers, and arrays that leave as files.

function half(bits) {
  const exponent = (bits >> 10) & 31, fraction = bits & 1023, sign = bits & 0x8000 ? -1 : 1;
  return sign * (exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24);
}

const VIEWS = { f4: Float32Array, u1: Uint8Array, i4: Int32Array, f2: Uint16Array };

// {dtype, shape, data} -> {shape, values}, for every array inside an answer
export function decode(value) {
  if (Array.isArray(value)) return value.map(decode);
  if (!value || typeof value !== "object" || ArrayBuffer.isView(value)) return value;
  if (value.dtype && typeof value.data === "string") {
    const text = atob(value.data), bytes = new Uint8Array(text.length);
    for (let n = 0; n < text.length; n++) bytes[n] = text.charCodeAt(n);
    const raw = new VIEWS[value.dtype](bytes.buffer);
    return { shape: value.shape, values: value.dtype === "f2" ? Float32Array.from(raw, half) : raw };
  }
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, decode(item)]));
}

// ---- NPZ: a zip archive of .npy files, stored without compression

const CRC = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let k = 0; k < 8; k++) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1;
  return n;
});

function checksum(bytes) {
  let crc = ~0;
  for (const byte of bytes) crc = CRC[(crc ^ byte) & 255] ^ (crc >>> 8);
  return ~crc >>> 0;
}

function npy({ shape, values }) {
  const kind = { Float32Array: "<f4", Int32Array: "<i4", Uint8Array: "|u1" }[values.constructor.name];
  const facts = `{'descr': '${kind}', 'fortran_order': False, 'shape': (${shape.join(", ")}${shape.length === 1 ? "," : ""}), }`;
  const text = facts.padEnd(Math.ceil((facts.length + 11) / 64) * 64 - 11) + "\n";
  const head = [0x93, ...[..."NUMPY"].map((c) => c.charCodeAt(0)), 1, 0, text.length & 255, text.length >> 8];
  const bytes = new Uint8Array(head.length + text.length + values.byteLength);
  bytes.set(head);
  bytes.set([...text].map((c) => c.charCodeAt(0)), head.length);
  bytes.set(new Uint8Array(values.buffer, values.byteOffset, values.byteLength), head.length + text.length);
  return bytes;
}

const number = (value, bytes) => Array.from({ length: bytes }, (_, n) => (value >>> (8 * n)) & 255);

// {name: {shape, values}} -> the bytes of an .npz file that numpy.load reads
export function npz(arrays) {
  const parts = [], index = [];
  let at = 0;
  for (const [name, array] of Object.entries(arrays)) {
    const data = npy(array), file = [...`${name}.npy`].map((c) => c.charCodeAt(0));
    const facts = [...number(0, 2), ...number(0, 2), ...number(0, 2), ...number(33, 2), ...number(checksum(data), 4),
      ...number(data.length, 4), ...number(data.length, 4), ...number(file.length, 2), ...number(0, 2)];
    const head = [0x50, 0x4b, 3, 4, ...number(20, 2), ...facts, ...file];
    index.push([0x50, 0x4b, 1, 2, ...number(20, 2), ...number(20, 2), ...facts, ...number(0, 2), ...number(0, 2), ...number(0, 2), ...number(0, 4), ...number(at, 4), ...file]);
    parts.push(Uint8Array.from(head), data);
    at += head.length + data.length;
  }
  const list = Uint8Array.from(index.flat()), count = index.length;
  const end = [0x50, 0x4b, 5, 6, ...number(0, 4), ...number(count, 2), ...number(count, 2), ...number(list.length, 4), ...number(at, 4), ...number(0, 2)];
  return new Blob([...parts, list, Uint8Array.from(end)]);
}

export function csv(rows, columns, values) {
  const quote = (text) => `"${String(text).replace(/"/g, '""')}"`;
  const lines = [["", ...columns].map(quote).join(",")];
  rows.forEach((name, r) => lines.push([quote(name), ...Array.from({ length: columns.length }, (_, c) => values[r * columns.length + c])].join(",")));
  return lines.join("\n") + "\n";
}

export function download(name, content, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
