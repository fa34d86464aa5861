// A child process that the studio started: ask for its output until it ends.
import { useState, useEffect, useRef, useStudio } from "../ui.js";

export function useJob() {
  const { source, fail } = useStudio();
  const [job, put] = useState(null), live = useRef(0);
  useEffect(() => () => { live.current++; }, []);
  const watch = async (id, own) => {
    for (;;) {
      const found = await source.ask("job", { id });
      if (own !== live.current) return;
      put(found);
      if (found.ended) return;
      await new Promise((next) => setTimeout(next, 300));
    }
  };
  const start = async (kind, options) => {
    const own = ++live.current;
    put({ ended: false, output: "" });
    try {
      await watch((await source.ask("start", { kind, ...options })).id, own);
    } catch (error) {
      put(null);
      fail(error);
    }
  };
  const stop = () => job && job.id && source.ask("stop", { id: job.id }).catch(fail);
  return [job, start, stop];
}
