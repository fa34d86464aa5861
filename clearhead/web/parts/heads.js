// Heads of an answer, one by one, and their small pictures.
import { html } from "../ui.js";
import { Thumbnail } from "./heatmap.js";

export function headsOf(maps) {
  return maps.flatMap((map) => map.heads.map((head, at) => {
    const [, rows, columns] = map.thumbnails.shape;
    return { map, head, at, rows, columns, shades: map.thumbnails.values.subarray(at * rows * columns, (at + 1) * rows * columns), key: `${map.place}.${map.layer}.${head.head}` };
  }));
}

export function Picture({ one }) {
  return html`<${Thumbnail} values=${one.shades} rows=${one.rows} columns=${one.columns} signed=${one.map.signed} />`;
}
