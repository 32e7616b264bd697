// What a report does where the reader points, types and drags. Texts from files are put in as text, never as markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const tip = $("tip");

  function say(lines, at) {
    tip.replaceChildren(
      ...lines.map((line, number) => Object.assign(document.createElement(number ? "div" : "b"), { textContent: line })),
    );
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(at.x + 14, innerWidth - width - 6))}px`;
    tip.style.top = `${at.y + 18 + height > innerHeight ? Math.max(4, at.y - height - 12) : at.y + 18}px`;
  }
  const hush = () => { tip.hidden = true; };
  addEventListener("scroll", hush, { passive: true });

  // The network ----------------------------------------------------------------------------------------------------
  const graph = $("graph");
  const COLUMN = 3, BOX = [0.84 * COLUMN, 0.66];  // a column is three lanes wide
  const svg = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const { layers, edges } = data.network;
  let boxes = [], whole = [0, 0, 1, 1], view = whole, chosen = -1, drawn = "";
  const groups = [];
  const before = layers.map(() => []), after = layers.map(() => []);
  for (const [maker, reader] of edges) { before[reader].push(maker); after[maker].push(reader); }

  const short = (name, most) => (name.length <= most ? name : `…${name.slice(1 - most)}`);
  function lay() {
    const word = graph.clientWidth < 640 ? "narrow" : "wide";
    if (word === drawn) return;
    drawn = word;
    const found = data.network.drawn[word];
    boxes = found.boxes.map(([x, y]) => [x * COLUMN, y]);
    whole = [-0.6, -0.4, found.size[0] * COLUMN + 1.2, found.size[1] + 0.8];
    const path = found.lines.map(([x0, y0, x1, y1]) => {
      const [a, b] = [x0 * COLUMN, x1 * COLUMN], middle = (a + b) / 2;
      return y0 === y1 ? `M${a} ${y0}H${b}` : `M${a} ${y0}C${middle} ${y0} ${middle} ${y1} ${b} ${y1}`;
    });
    const scene = document.createDocumentFragment();
    scene.append(svg("path", { d: path.join("") }));
    layers.forEach(([name, kind, stage], number) => {
      const colour = data.stages[stage].colour, [x, y] = boxes[number];
      const group = svg("g", { class: "layer", transform: `translate(${x} ${y})`, "data-layer": number });
      group.append(
        svg("rect", { x: -BOX[0] / 2, y: -BOX[1] / 2, width: BOX[0], height: BOX[1], rx: 0.14, stroke: colour,
          fill: colour, style: "fill-opacity: var(--box)" }),
        svg("text", { y: kind ? -0.02 : 0.09, style: "font-size: 0.3px" }, short(name, 15)),
      );
      if (kind) group.append(svg("text", { y: 0.24, class: "kind", style: "font-size: 0.21px" }, kind));
      groups[number] = group;
      scene.append(group);
    });
    graph.replaceChildren(scene);
    show(whole);
    search();
    if (chosen >= 0) groups[chosen].classList.add("chosen");
  }
  function show(next) {
    view = next;
    graph.setAttribute("viewBox", view.join(" "));
    const scale = Math.min(graph.clientWidth / view[2], graph.clientHeight / view[3]);
    graph.classList.toggle("far", scale * 0.3 < 5.6);  // smaller letters nobody reads
  }
  function zoom(factor, at = [view[0] + view[2] / 2, view[1] + view[3] / 2]) {
    const least = 4 / Math.max(view[2], view[3]), most = (1.6 * Math.max(whole[2], whole[3])) / Math.max(view[2], view[3]);
    const by = Math.max(least, Math.min(most, factor));
    show([at[0] - (at[0] - view[0]) * by, at[1] - (at[1] - view[1]) * by, view[2] * by, view[3] * by]);
  }
  function place(event) {
    const matrix = graph.getScreenCTM().inverse(), point = new DOMPoint(event.clientX, event.clientY);
    const { x, y } = point.matrixTransform(matrix);
    return [x, y];
  }
  const about = (number) => {
    const [name, kind, stage, facts] = layers[number];
    return [name, `${kind ? `${kind}, ` : ""}${data.stages[stage].name} on ${data.stages[stage].devices}`, ...facts];
  };
  function choose(number, near = true, seek = false) {
    if (chosen >= 0) groups[chosen].classList.remove("chosen");
    chosen = number;
    if (number < 0) return;
    groups[number].classList.add("chosen");
    const [first, ...others] = about(number);
    const name = Object.assign(document.createElement("b"), { textContent: first });
    $("layer").replaceChildren(name, ` – ${others.join("; ")}`);
    const [x, y] = boxes[number], wide = COLUMN * 6, inside = Math.min(view[2], wide);
    if (near && (view[2] > wide * 1.5 && (seek || graph.classList.contains("far")) || x < view[0] || x > view[0] + view[2] || y < view[1] || y > view[1] + view[3])) {
      const high = inside * (graph.clientHeight / Math.max(1, graph.clientWidth));
      show([x - inside / 2, y - high / 2, inside, high]);
    }
  }
  let matches = [], next = -1;
  function search() {
    const text = $("search").value.trim().toLowerCase();
    matches = text ? layers.flatMap(([name, kind], n) => (`${name} ${kind}`.toLowerCase().includes(text) ? [n] : [])) : [];
    next = -1;
    graph.classList.toggle("sought", Boolean(text));
    groups.forEach((group, number) => group.classList.toggle("match", false));
    matches.forEach((number) => groups[number].classList.add("match"));
    $("matches").textContent = text ? `${matches.length} of ${layers.length}${matches.length ? ", Enter shows the next" : ""}` : "";
  }
  $("search").addEventListener("input", search);
  $("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && matches.length) choose(matches[(next = (next + 1) % matches.length)], true, true);
    if (event.key === "Escape") { event.target.value = ""; search(); }
  });
  for (const chip of document.querySelectorAll("[data-stage]")) {
    chip.addEventListener("click", () => {
      const on = chip.getAttribute("aria-pressed") !== "true";
      for (const other of document.querySelectorAll("[data-stage]")) other.setAttribute("aria-pressed", String(on && other === chip));
      graph.classList.toggle("staged", on);
      groups.forEach((group, n) => group.classList.toggle("shown", on && layers[n][2] === Number(chip.dataset.stage)));
    });
  }
  $("zoom-in").addEventListener("click", () => zoom(0.7));
  $("zoom-out").addEventListener("click", () => zoom(1 / 0.7));
  $("zoom-all").addEventListener("click", () => show(whole));
  graph.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;  // the page scrolls
    event.preventDefault();
    zoom(1.0016 ** event.deltaY, place(event));
  }, { passive: false });
  const held = new Map();
  graph.addEventListener("pointerdown", (event) => {
    held.set(event.pointerId, event);
    graph.setPointerCapture(event.pointerId);
    graph.classList.add("dragged");
  });
  graph.addEventListener("pointermove", (event) => {
    const last = held.get(event.pointerId);
    if (!last) {
      const layer = event.target.closest?.(".layer");
      if (layer) say(about(Number(layer.dataset.layer)), { x: event.clientX, y: event.clientY }); else hush();
      return;
    }
    hush();
    if (held.size === 2) {
      const [other] = [...held.values()].filter((one) => one.pointerId !== event.pointerId);
      const apart = (one) => Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY) || 1;
      zoom(apart(last) / apart(event), place(other));
    } else {
      const [a, b] = [place(last), place(event)];
      show([view[0] + a[0] - b[0], view[1] + a[1] - b[1], view[2], view[3]]);
      last.moved = true;
      event.moved = true;
    }
    held.set(event.pointerId, event);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    graph.addEventListener(name, (event) => {
      const last = held.get(event.pointerId);
      held.delete(event.pointerId);
      graph.classList.remove("dragged");
      const layer = document.elementFromPoint(event.clientX, event.clientY)?.closest(".layer");
      if (last && !last.moved && layer) choose(Number(layer.dataset.layer), false);
    });
  }
  graph.addEventListener("pointerleave", hush);
  graph.addEventListener("keydown", (event) => {
    const to = { ArrowRight: after, ArrowLeft: before }[event.key];
    if (event.key === "+" || event.key === "=") zoom(0.7);
    else if (event.key === "-") zoom(1 / 0.7);
    else if (event.key === "0" || event.key === "Home") show(whole);
    else if (to) choose(chosen < 0 ? 0 : (to[chosen][0] ?? chosen));
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      choose(Math.max(0, Math.min(layers.length - 1, chosen + (event.key === "ArrowDown" ? 1 : -1))));
    } else return;
    event.preventDefault();
  });
  lay();
  addEventListener("resize", () => { lay(); show(view); });

  // The charts -----------------------------------------------------------------------------------------------------
  // A chart is drawn when the reader comes near, or has looked at what is there for a moment.
  const { Document } = Bokeh.require("document");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const waiting = new Set([...document.querySelectorAll("[id^=data-]")].map((each) => each.id.slice("data-".length)));
  const painted = [];
  async function draw(element) {
    if (!waiting.delete(element)) return;
    const found = Document.from_json(JSON.parse($(`data-${element}`).textContent));
    painted.push(found);
    paint(found);
    await Bokeh.embed.add_document_standalone(found, $(element));
    const plots = [...found.all_models].filter((model) => model.type === "Figure");
    for (const plot of plots) plot.setv({ min_border_right: 14 });  // laid out and painted again, now in its true place
    plots.forEach(point_at);
    if (element === "step-chart") step_controls(plots);
    if (!waiting.size) document.documentElement.dataset.drawn = "yes";
  }
  function paint(found) {
    const style = getComputedStyle(document.documentElement);
    const [text, soft, line, card] = ["--text", "--soft", "--line", "--card"].map((name) => style.getPropertyValue(name).trim());
    const colours = { messages: soft, rule: soft, pointed: text };
    for (const model of found.all_models) {
      if (model.type.endsWith("Axis")) {
        model.setv({ axis_label_text_color: text, major_label_text_color: soft, axis_line_color: line,
          major_tick_line_color: line, axis_label_text_font_style: "normal" });
      } else if (model.type === "Grid") model.setv({ grid_line_color: line });
      else if (model.type === "Span") model.setv({ line_color: soft });
      else if (model.type !== "GlyphRenderer") continue;
      else if (colours[model.name]) model.glyph.setv({ line_color: { value: colours[model.name] } });
      else if (model.name === "names") model.glyph.setv({ text_color: { value: text } });
      else if (model.name?.startsWith("action ") && model.glyph.line_color.value !== null) {
        model.glyph.setv({ line_color: { value: card } });
      }
    }
  }
  dark.addEventListener("change", () => painted.forEach(paint));
  const near = new IntersectionObserver((seen) => {
    for (const { isIntersecting, target } of seen) {
      if (isIntersecting) { near.unobserve(target); draw(target.id); }
    }
  }, { rootMargin: "300px" });
  const idle = globalThis.requestIdleCallback ?? ((work) => setTimeout(work, 200));
  const others = async () => { for (const element of [...waiting]) { await new Promise((done) => idle(done)); await draw(element); } };
  for (const element of waiting) near.observe($(element));
  addEventListener("beforeprint", () => [...waiting].forEach(draw));
  requestAnimationFrame(() => setTimeout(() => { document.documentElement.dataset.ready = "yes"; idle(others); }));

  let pointer = { x: 0, y: 0 };
  addEventListener("pointermove", (event) => { pointer = { x: event.clientX, y: event.clientY }; }, { passive: true, capture: true });
  const ms = (value) => `${value >= 100 ? value.toFixed(0) : value.toFixed(value >= 10 ? 1 : 2)} ms`;

  // Messages of a panel: [sent in ms, rank, there in ms, rank, stage, stage, micro-batch, whether a gradient].  Where
  // stages have several ranks the timeline does not say which piece is whose: ends are joined in order of ranks.
  function messages_of(plot) {
    const ends = new Map();
    for (const renderer of plot.renderers) {
      const op = (renderer.name ?? "").split(" ")[1] ?? "", sends = op.startsWith("SEND_");
      if (!sends && !op.startsWith("RECV_")) continue;
      const { left, right, rank, stage, microbatch, peer } = renderer.data_source.data;
      for (let n = 0; n < left.length; n++) {
        const key = [sends ? stage[n] : peer[n], sends ? peer[n] : stage[n], microbatch[n], Number(op.endsWith("B"))];
        const text = key.join(" ");
        if (!ends.has(text)) ends.set(text, { key, sent: [], there: [] });
        ends.get(text)[sends ? "sent" : "there"].push([sends ? left[n] : right[n], rank[n]]);
      }
    }
    const found = [];
    for (const { key, sent, there } of ends.values()) {
      for (const side of [sent, there]) side.sort((a, b) => a[1] - b[1]);
      const pieces = sent.length && there.length ? Math.max(sent.length, there.length) : 0;
      const of = (side, piece) => side[Math.floor((piece * side.length) / pieces)];
      for (let piece = 0; piece < pieces; piece++) found.push([...of(sent, piece), ...of(there, piece), ...key]);
    }
    return found;
  }
  const drawn_messages = (found) => ({ x0: found.map((m) => m[0]), y0: found.map((m) => m[1]),
    x1: found.map((m) => m[2]), y1: found.map((m) => m[3]) });

  function point_at(plot) {
    const pointed = plot.renderers.find((one) => one.name === "pointed");
    let index = null;
    const of_action = (stage, microbatch, gradient) => {
      if (!index) {
        index = new Map();
        for (const message of messages_of(plot)) {
          for (const end of [message[4], message[5]]) {
            const key = `${end} ${message[6]} ${message[7]}`;
            if (!index.has(key)) index.set(key, []);
            index.get(key).push(message);
          }
        }
      }
      return index.get(`${stage} ${microbatch} ${Number(gradient)}`) ?? [];
    };
    const told = ([sent, , there, , src, dst, , gradient]) => {
      const size = (data.sent[`${src}>${dst}`] ?? data.sent[`${dst}>${src}`])?.[gradient];
      return `${gradient ? "gradient" : "activation"} from stage ${src} to ${dst}${size ? `, ${size}` : ""}: sent ${ms(sent)}, there ${ms(there)}`;
    };
    for (const renderer of plot.renderers) {
      const source = renderer.data_source;
      source.inspect?.connect(() => {
        const inspected = source.inspected;
        const [kind, op, ...words] = (renderer.name ?? "").split(" ");
        const at = inspected.indices[0] ?? inspected.line_indices?.[0];
        if (inspected.indices.length === 0 && !inspected.line_indices?.length) {
          if (point_at.by === renderer) { point_at.by = null; hush(); if (pointed) pointed.data_source.data = drawn_messages([]); }
          return;
        }
        point_at.by = renderer;
        const values = source.data;
        if (kind === "action") {
          const stage = values.stage[at], microbatch = values.microbatch[at];
          const found = /^(F|B|I|SEND_.|RECV_.)$/.test(op) ? of_action(stage, microbatch, !op.endsWith("F")) : [];
          say([
            `${words.join(" ")}${microbatch >= 0 ? ` of micro-batch ${microbatch}` : ""}`,
            `stage ${stage}, rank ${values.rank[at]} (${data.devices[values.rank[at]] ?? ""})`,
            `${ms(values.left[at])} to ${ms(values.right[at])}: ${ms(values.right[at] - values.left[at])}`,
            ...found.slice(0, 6).map(told),
            ...(found.length > 6 ? [`and ${found.length - 6} more messages`] : []),
          ], pointer);
          if (pointed) pointed.data_source.data = drawn_messages(found);
        } else if (kind === "memory") {
          const [line, places] = [...(inspected.multiline_indices ?? [])][0] ?? [at, [0]];
          const rank = values.rank[line], place = places[0] ?? 0;
          say([
            `rank ${rank} (${data.devices[rank] ?? ""}), ${op}`,
            `${values.ys[line][place].toPrecision(3)} MiB at ${ms(values.xs[line][place])}`,
            ...(data.limits[rank] ? [`may use ${data.limits[rank]}`] : []),
          ], pointer);
        } else if (kind === "plans") {
          const [name, role, step, peak] = data.points[values.point[at]];
          say([name, role === "chosen" ? "this plan" : role, `step ${step}`, `fullest rank ${peak}`], pointer);
        }
      });
    }
  }

  function step_controls(panels) {
    if (!panels.length) return;
    const range = panels[0].x_range, end = range.end;
    const move = (factor, by = 0) => {
      if (factor === 0) { range.setv({ start: 0, end }); return; }
      const width = Math.min(end, (range.end - range.start) * factor);
      const middle = (range.start + range.end) / 2 + by * width;
      const start = Math.max(0, Math.min(end - width, middle - width / 2));
      range.setv({ start, end: start + width });
    };
    for (const button of document.querySelectorAll("[data-zoom]")) {
      button.addEventListener("click", () => move(Number(button.dataset.zoom)));
    }
    $("step-chart").addEventListener("keydown", (event) => {
      const moves = { "+": [0.5], "=": [0.5], "-": [2], 0: [0], Home: [0], ArrowLeft: [1, -0.2], ArrowRight: [1, 0.2] }[event.key];
      if (!moves) return;
      move(...moves);
      event.preventDefault();
    });
    $("step-chart").addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      move(1.0016 ** event.deltaY);
    }, { passive: false });
    const named = (test) => panels.flatMap((panel) => panel.renderers.filter((one) => test(one.name ?? "")));
    for (const chip of document.querySelectorAll("[data-ops]")) {
      const ops = chip.dataset.ops.split(" ");
      const bars = named((name) => name.startsWith("action ") && ops.includes(name.split(" ")[1]));
      chip.setAttribute("aria-pressed", String(bars.some((one) => one.visible)));
      chip.addEventListener("click", () => {
        const on = chip.getAttribute("aria-pressed") !== "true";
        chip.setAttribute("aria-pressed", String(on));
        for (const one of bars) one.visible = on;
      });
    }
    $("step-messages").addEventListener("click", (event) => {
      const on = event.target.getAttribute("aria-pressed") !== "true";
      event.target.setAttribute("aria-pressed", String(on));
      for (const panel of panels) {
        const lines = panel.renderers.find((one) => one.name === "messages");
        lines.data_source.data = drawn_messages(on ? messages_of(panel) : []);
      }
    });
  }
})();
