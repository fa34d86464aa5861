// The page of `clearhead inspect --out page.html`: answers are enclosed in it.
import { enclosed } from "./source.js";
import { start } from "./studio.js";

const data = JSON.parse(document.getElementById("answers").textContent);
start(document.getElementById("root"), enclosed(data.answers), data.options);
