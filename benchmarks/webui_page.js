// Runs in the page before its own scripts: counts the script time of frames, and long tasks.
(() => {
  const frames = [];
  const tasks = [];
  let spent = 0;
  let isOn = false;
  const longTasks = new PerformanceObserver((list) => {
    if (isOn) for (const entry of list.getEntries()) tasks.push(entry.duration);
  });
  longTasks.observe({ type: "longtask", buffered: false });

  /** Add the time of what runs within events and frames. */
  const timed = (work) =>
    function (...given) {
      const began = performance.now();
      try {
        return work.apply(this, given);
      } finally {
        spent += performance.now() - began;
      }
    };
  const request = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = (work) => request(timed(work));
  const wrapped = new WeakMap();
  const add = EventTarget.prototype.addEventListener;
  const remove = EventTarget.prototype.removeEventListener;
  EventTarget.prototype.addEventListener = function (kind, work, options) {
    if (typeof work !== "function") return add.call(this, kind, work, options);
    if (!wrapped.has(work)) wrapped.set(work, timed(work));
    return add.call(this, kind, wrapped.get(work), options);
  };
  EventTarget.prototype.removeEventListener = function (kind, work, options) {
    return remove.call(this, kind, wrapped.get(work) ?? work, options);
  };
  // React's work comes in messages.
  const slot = Object.getOwnPropertyDescriptor(MessagePort.prototype, "onmessage");
  Object.defineProperty(MessagePort.prototype, "onmessage", {
    ...slot,
    set(work) {
      slot.set.call(this, typeof work === "function" ? timed(work) : work);
    },
  });

  const tick = () => {
    if (isOn) frames.push(spent);
    spent = 0;
    request(tick);
  };
  request(tick);
  window.paceline = {
    begin: () => {
      frames.length = tasks.length = 0;
      isOn = true;
    },
    end: () => {
      isOn = false;
      return { frames: [...frames], tasks: [...tasks] };
    },
    /** Return the milliseconds until `test` holds and what shows it is painted. */
    until: async (test) => {
      const began = performance.now();
      while (!test()) await new Promise((resolve) => request(resolve));
      await new Promise((resolve) => request(() => setTimeout(resolve)));
      return performance.now() - began;
    },
  };
})();
