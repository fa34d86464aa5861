// The page of `clearhead studio`.
import { served } from "./source.js";
import { start } from "./studio.js";

start(document.getElementById("root"), served(), { lang: document.documentElement.dataset.lang });
