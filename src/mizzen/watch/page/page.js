// The page of `mizzen watch`. Every text of a run goes in by textContent, or through `plain` where plotly draws it.
"use strict";
(() => {
  const PERIOD = 1000;
  const FIRST = ["loss", "lr", "grad_norm", "tokens_per_sec", "mfu", "exposed", "skipped_steps"];
  const LABELS = {
    loss: "loss", lr: "learning rate", grad_norm: "gradient norm", tokens_per_sec: "tokens per second", mfu: "MFU",
    skipped_steps: "skipped steps", loss_scale: "loss scale", samples: "samples of a step", seconds: "seconds of a step",
  };
  const MARKS = {start: "--info", restart: "--info", save: "--good", skip: "--warn", end: "--bad"};
  const WORDS = {start: "start", restart: "restart", load: "resume", save: "checkpoint", skip: "skipped", end: "ended"};
  const MOST_RANK_LINES = 16;
  const CONFIG = {displayModeBar: false, responsive: true, showTips: false};
  const find = id => document.getElementById(id);
  const runs = [];
  let revision = 0, axis = "";

  // Small things

  const make = (tag, text, kind) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  };
  // What has not changed stays, so that an error can be selected and copied while the page goes on.
  const fill = (place, elements) => {
    const next = make("div");
    next.append(...elements);
    if (next.innerHTML !== place.innerHTML) place.replaceChildren(...elements);
  };
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colourOf = index => `--run${index % 6}`;
  // Plotly reads a little markup in its texts; these are texts and nothing else.
  const plain = text => String(text).slice(0, 80).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const isBytes = name => name.startsWith("memory");
  const bytes = value => {
    const power = Math.max(0, Math.min(4, Math.floor(Math.log2(value || 1) / 10)));
    return `${+(value / 2 ** (10 * power)).toPrecision(4)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
  };
  const number = (name, value) => {
    if (typeof value !== "number") return value === undefined || value === null ? "–" : String(value);
    if (isBytes(name)) return bytes(value);
    if (name === "mfu") return `${(100 * value).toFixed(1)} %`;
    if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
    return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(5));
  };
  const clock = time => new Date(time * 1000).toLocaleString("sv");
  const ago = seconds => seconds < 90 ? `${seconds.toFixed(0)} s ago` : seconds < 5400
    ? `${(seconds / 60).toFixed(0)} min ago` : `${(seconds / 3600).toFixed(1)} h ago`;
  const label = name => Object.hasOwn(LABELS, name) ? LABELS[name]
    : name.replace(/^comm_exposed_ms_/, "exposed communication, ms: ").replaceAll("_", " ");
  const order = name => {
    const at = FIRST.indexOf(name.includes("exposed") ? "exposed" : name);
    return at < 0 ? FIRST.length + !name.startsWith("memory per") : at;
  };

  // What the server says

  const join = (known, columns) => {
    for (const [name, values] of Object.entries(columns)) {
      if (name === "from") continue;
      known[name] = (known[name] ?? []).slice(0, columns.from).concat(values);
    }
  };
  const take = changes => {
    revision = changes.revision;
    changes.runs.forEach((told, index) => {
      const run = runs[index] ??= {drawn: new Map(), ranked: new Map(), allMarks: [], planned: null};
      Object.assign(run, told);
      for (const [place, changed] of [[run.drawn, told.series], [run.ranked, told.memory]]) {
        for (const [name, columns] of Object.entries(changed)) {
          if (!place.has(name)) place.set(name, {});
          join(place.get(name), columns);
        }
      }
      run.allMarks = run.allMarks.concat(told.marks).slice(-500);
      run.planned = told.plan ?? run.planned;
      run.hasNews = Object.keys(told.series).length + Object.keys(told.memory).length + told.marks.length > 0;
    });
  };

  // Summaries

  const drawRuns = () => fill(find("runs"), runs.map((run, index) => {
    const card = make("article", undefined, `card run is-${run.state}`);
    card.style.setProperty("--colour", `var(${colourOf(index)})`);
    const line = make("div");
    const reading = run.read < 0.999 ? `reading, ${Math.floor(run.read * 100)} % · ` : "";
    line.append(make("strong", run.name), make("span", run.state, `state ${run.state}`),
      make("span", reading + run.words, "words"));
    const figures = make("dl");
    const names = Object.keys(run.latest).filter(name => order(name) < FIRST.length).sort((a, b) => order(a) - order(b));
    const used = run.ranks.map(rank => rank.memory).filter(value => value !== null);
    const shown = [["step", "step", run.step], ...names.map(name => [name, label(name), run.latest[name]])];
    if (used.length) shown.push(["memory", "memory, fullest rank", Math.max(...used)]);
    for (const [name, title, value] of shown) {
      const group = make("div");
      const figure = make("dd", number(name, value));
      figure.dataset.name = name;
      group.append(make("dt", title), figure);
      figures.append(group);
    }
    card.append(line, figures);
    if (run.passed_over) card.append(make("p", `${run.passed_over.toLocaleString("en")} lines or numbers were passed over: unreadable, or of too many names`, "words"));
    return card;
  }));

  const drawRanks = () => {
    find("ranks-section").hidden = runs.every(run => !run.ranks.length);
    fill(find("ranks"), runs.filter(run => run.ranks.length).map(run => {
      const group = make("div", undefined, "ranks");
      const most = Math.max(...run.ranks.map(rank => rank.memory ?? 0));
      group.append(...run.ranks.map(rank => {
        const tile = make("div", undefined, `card rank ${rank.state}`);
        const head = make("div");
        const title = runs.length > 1 ? `${run.name} · rank ${rank.rank}` : `rank ${rank.rank}`;
        head.append(make("strong", title), make("span", rank.state, `state ${rank.state}`));
        tile.append(head, make("p", `step ${rank.step} · ${rank.where || "–"}`));
        if (rank.memory !== null) {
          const bar = make("meter");
          Object.assign(bar, {min: 0, max: most, value: rank.memory, title: "memory, beside the fullest rank"});
          tile.append(bar);
        }
        const heard = find("data").textContent.trim() ? "" : ` · ${ago(rank.ago)}`;
        tile.append(make("p", `${rank.memory === null ? "" : bytes(rank.memory) + " · "}${rank.host}${heard}`));
        if (rank.error) tile.append(make("p", rank.error));
        return tile;
      }));
      return group;
    }));
  };

  const drawMarks = () => {
    const all = runs.flatMap(run => run.allMarks.map(mark => ({...mark, run})));
    all.sort((first, second) => second.time - first.time);
    find("marks-section").hidden = !all.length;
    find("marks").replaceChildren(...all.map(mark => {
      const row = make("li");
      const from = runs.length > 1 ? `${mark.run.name}: ` : "";
      row.append(make("time", clock(mark.time)), make("strong", WORDS[mark.kind] ?? mark.kind),
        make("span", `${from}step ${mark.step} · ${mark.text}`));
      return row;
    }));
  };

  // The plan: ranks as a grid (one row for each pipeline stage), and the bytes of one of them as a bar

  const shape = (tag, attributes, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const picture = plan => {
    const {pp = 1, dp = 1, sp = 1, tp = 1} = plan.layout;
    const columns = Math.min(dp, 16), rows = Math.min(pp, 8), inner = Math.min(sp * tp, 8);
    const width = 320, cell = (width - 40) / columns, high = Math.max(26, Math.min(cell, 44));
    const svg = shape("svg", {viewBox: `0 0 ${width} ${rows * (high + 4) + 110}`, role: "img", "aria-label": "the plan as a picture"});
    svg.append(shape("text", {x: 0, y: 11, class: "soft"}, `${pp * dp * sp * tp} ranks: pp ${pp} × dp ${dp} × sp ${sp} × tp ${tp}`));
    for (let row = 0; row < rows; row++) {
      svg.append(shape("text", {x: 0, y: 20 + row * (high + 4) + high / 2 + 4, class: "soft"}, pp > 1 ? `pp ${row}` : "dp"));
      for (let column = 0; column < columns; column++) {
        for (let part = 0; part < inner; part++) {
          const size = (cell - 4) / inner;
          const x = 34 + column * cell + part * size, y = 20 + row * (high + 4);
          const fill = `var(${colourOf(part)})`;
          svg.append(shape("rect", {x, y, width: Math.max(1, size - 1), height: high, rx: 3, fill, opacity: .28}));
        }
      }
    }
    const total = Object.values(plan.cost).reduce((sum, value) => sum + value, 0);
    let x = 0;
    const top = 20 + rows * (high + 4) + 24;
    if (total) svg.append(shape("text", {x: 0, y: top - 8, class: "soft"}, `the fullest rank holds ${bytes(total)}, without activations`));
    Object.entries(plan.cost).forEach(([name, value], index) => {
      if (!total) return;
      const wide = width * value / total;
      svg.append(shape("rect", {x, y: top, width: wide, height: 14, fill: `var(${colourOf(index)})`, opacity: .8}));
      svg.append(shape("rect", {x: (index % 2) * 160, y: top + 24 + 16 * (index >> 1), width: 9, height: 9, fill: `var(${colourOf(index)})`}));
      svg.append(shape("text", {x: (index % 2) * 160 + 14, y: top + 33 + 16 * (index >> 1)}, `${name} ${bytes(value)}`));
      x += wide;
    });
    return svg;
  };
  const drawPlans = () => {
    find("plan-section").hidden = runs.every(run => !run.planned);
    find("plans").replaceChildren(...runs.filter(run => run.planned).map(run => {
      const card = make("div", undefined, "card plan");
      if (runs.length > 1) card.append(make("strong", run.name), make("span"));
      card.append(picture(run.planned), make("pre", run.planned.text));
      return card;
    }));
  };

  // Charts

  const start = run => Math.min(...[...run.drawn.values()].map(columns => columns.time[0]), run.allMarks[0]?.time ?? run.heard);
  const across = (run, columns) => axis === "step" ? columns.step
    : columns.time.map(time => time === null ? null : axis === "time" ? new Date(time * 1000) : (time - run.began) / 60);
  // A run that went back to a checkpoint begins a new line there.
  const broken = columns => {
    const cuts = columns.step.flatMap((step, at) => at && step < columns.step[at - 1] ? [at] : []);
    const parted = values => values.flatMap((value, at) => cuts.includes(at) ? [null, value] : [value]);
    return cuts.length ? Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, parted(values)])) : columns;
  };
  const lines = name => runs.flatMap((run, index) => {
    if (!run.drawn.has(name)) return [];
    const columns = broken(run.drawn.get(name));
    const x = across(run, columns), main = colour(colourOf(index)), shared = {x, type: "scatter", hoverinfo: "skip", line: {width: 0}};
    const last = {x, y: columns.last, type: "scatter", mode: columns.last.length === 1 ? "markers" : "lines", line: {width: 1.6, color: main},
      marker: {color: main}, hovertemplate: `%{y:.6~g}<extra>${runs.length > 1 ? plain(run.name) : ""}</extra>`};
    if (!columns.low) return [last];
    return [{...shared, y: columns.low, mode: "lines"}, {...shared, y: columns.high, mode: "lines", fill: "tonexty", fillcolor: `${main}33`}, last];
  });
  const memoryLines = () => runs.flatMap((run, index) => {
    const fullest = [...run.ranked].sort((a, b) => b[1].last.at(-1) - a[1].last.at(-1)).slice(0, MOST_RANK_LINES);
    return fullest.sort((a, b) => a[0] - b[0]).map(([rank, known]) => {
      const columns = broken(known);
      const main = colour(colourOf(runs.length > 1 ? index : Number(rank)));
      return {x: across(run, columns), y: columns.last.map(value => value === null ? null : value / 2 ** 30), type: "scatter", mode: "lines+markers",
        line: {width: 1.4, color: main}, marker: {size: 3, color: main},
        hovertemplate: `%{y:.3f} GiB<extra>${runs.length > 1 ? plain(run.name) + " " : ""}rank ${plain(rank)}</extra>`};
    });
  });
  const shapes = () => runs.flatMap(run => run.allMarks.filter(mark => MARKS[mark.kind]).slice(-200).map(mark => {
    const x = axis === "step" ? mark.step : axis === "time" ? new Date(mark.time * 1000) : (mark.time - run.began) / 60;
    return {type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, layer: "below",
      line: {width: 1, dash: mark.kind === "save" ? "dot" : "dash", color: colour(MARKS[mark.kind])}};
  }));
  const layout = () => {
    const line = {gridcolor: colour("--grid"), linecolor: colour("--line"), zeroline: false};
    const title = axis === "elapsed" ? {text: "minutes", standoff: 4} : axis === "step" ? {text: "step", standoff: 4} : undefined;
    // Room for nine characters: margins that plotly finds by itself are not found where the next numbers come too soon.
    return {margin: {l: 64, r: 10, t: 8, b: 36}, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      font: {color: colour("--soft"), size: 11, family: "system-ui, sans-serif"}, hovermode: "x unified", shapes: shapes(), dragmode: "zoom",
      hoverlabel: {bgcolor: colour("--card"), bordercolor: colour("--line"), font: {color: colour("--text")}},
      xaxis: {...line, type: axis === "time" ? "date" : "linear", title}, yaxis: {...line, exponentformat: "power"}, uirevision: axis};
  };
  const plots = new Map();
  const place = (name, title, parent) => {
    if (!plots.has(name)) {
      const box = make("figure", undefined, "card chart");
      box.style.margin = 0;
      const plot = make("div", undefined, "plot");
      plot.dataset.name = name;
      box.append(title, plot);
      const after = [...parent.children].find(other => order(other.lastChild.dataset.name) > order(name));
      parent.insertBefore(box, after ?? null);
      plots.set(name, plot);
    }
    return plots.get(name);
  };
  const drawCharts = () => {
    for (const run of runs) run.began = start(run);
    const names = [...new Set(runs.flatMap(run => [...run.drawn.keys()]))].sort((a, b) => order(a) - order(b) || a.localeCompare(b));
    const common = layout(), more = find("more");
    find("charts-section").hidden = !names.length && runs.every(run => !run.ranked.size); // first: plotly measures its place
    for (const name of names) {
      const isFirst = order(name) < FIRST.length;
      if (!isFirst) more.hidden = false;
      if (!isFirst && !more.open) continue;
      const format = isBytes(name) ? ".3s" : name === "mfu" ? ".1%" : "";
      const unit = format ? {yaxis: {...common.yaxis, tickformat: format}} : {};
      Plotly.react(place(name, make("h3", label(name)), isFirst ? find("charts") : more.querySelector(".charts")), lines(name), {...common, ...unit}, CONFIG);
    }
    if (runs.some(run => run.ranked.size)) {
      const title = make("h3", "memory per rank ");
      title.append(make("small", "GiB; a line for each rank, a point for each heartbeat"));
      Plotly.react(place("memory per rank", title, find("charts")), memoryLines(), common, CONFIG);
    }
  };

  const draw = () => {
    if (!axis) choose(runs.length > 1 ? "step" : "time");
    document.title = `${runs.map(run => run.name).join(", ")} · mizzen watch`;
    drawRuns();
    drawRanks();
    if (runs.some(run => run.hasNews)) {
      drawMarks();
      drawPlans();
      drawCharts();
    }
  };
  const choose = value => {
    axis = value;
    document.querySelector(`#axis input[value="${value}"]`).checked = true;
  };

  // Life

  const say = (text, isGone) => {
    find("link").textContent = text;
    find("link").className = isGone ? "gone" : "";
  };
  const ask = async () => {
    const answer = await fetch(`data?since=${revision}`).then(answer => answer.ok ? answer.json() : null, () => null);
    setTimeout(ask, PERIOD);
    if (!answer) return say("mizzen watch has ended: this is the last that it said", true);
    take(answer);
    draw();
    say("live");
  };
  find("axis").addEventListener("change", event => { choose(event.target.value); drawCharts(); });
  find("more").addEventListener("toggle", drawCharts);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
  const inside = find("data").textContent.trim();
  if (inside) {
    const changes = JSON.parse(inside);
    take(changes);
    draw();
    say(`exported ${clock(changes.now)}`);
  } else {
    ask();
  }
})();
