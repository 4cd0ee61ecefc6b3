"use strict";
// Draws what a page's data holds. Text from files only ever becomes text content or an attribute's value.
(() => {
  const make = (tag, traits = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(traits)) {
      if (name === "text") made.textContent = value;
      else if (name === "press") made.addEventListener("click", value);
      else if (value !== false && value != null) made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  };
  const button = (text, press, traits = {}) => make("button", { type: "button", text, press, ...traits });
  const size = bytes => {
    if (bytes < 1024) return `${Math.round(bytes)} B`;
    let value = bytes, unit = "B";
    for (unit of ["KiB", "MiB", "GiB", "TiB"]) if ((value /= 1024) < 1024) break;
    return `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ${unit}`;
  };
  const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
  const share = (part, whole) => whole ? `${(100 * part / whole).toFixed(1)}%` : "–";
  // Runs are first, step, count; first, step, count; …
  const expand = runs => {
    const numbers = [];
    for (let i = 0; i < runs.length; i += 3)
      for (let k = 0; k < runs[i + 2]; k++) numbers.push(runs[i] + k * runs[i + 1]);
    return numbers;
  };
  const source = document.getElementById("data");
  const data = source && JSON.parse(source.textContent);
  const total = node => node[1];
  const isLeaf = node => !Array.isArray(node[2]);
  const NOBODY = -1, UNKNOWN = -2;
  const missing = data && data.missing || [];  // [file, rank], in the order of the findings
  const lostFiles = new Set(missing.map(each => each[0]));
  const lostRanks = new Map(missing.map((each, i) => [each[1], i + 1]));
  // How warm a number is among the usual ones, and a sign where it is far from all these: as `page.heats`.
  const scale = numbers => {
    const ordered = numbers.filter(each => each > 0).sort((a, b) => a - b), low = ordered[ordered.length >> 2], high = ordered[3 * ordered.length >> 2];
    const far = Math.max(1.5 * (high - low), .1 * high), most = ordered.filter(each => each <= high + far).pop();
    return number => number > 0 ? { heat: .12 + .68 * Math.min(1, number / most), sign: number > high + far ? "▲ " : number < low - far ? "▼ " : "" } : { heat: 0, sign: "" };
  };

  // A table of rows × columns, folded to what fits; a header or a cell that stands for several opens them.
  const matrix = (host, spec) => {
    const trail = make("div", { class: "trail", role: "group", "aria-label": `Zoom of ${spec.label}` });
    const frame = make("div", { class: "scroll" });
    const readout = make("p", { class: "readout dim", "aria-live": "polite", text: spec.help });
    host.append(trail, frame, readout);
    const views = [[0, spec.rows.length, 0, spec.columns.length]];
    const split = (from, to, most) => {
      let step = 1;
      while ((to - from) / step > most) step *= 2;
      const groups = [];
      for (let at = from; at < to; at += step) groups.push([at, Math.min(at + step, to)]);
      return groups;
    };
    const draw = moveFocus => {
      const [top, bottom, left, right] = views[views.length - 1];
      const room = Math.max(4, Math.floor((host.clientWidth - 150) / (spec.cellWidth || 28)));
      const rows = split(top, bottom, 40), columns = split(left, right, Math.min(64, room));
      const open = view => () => { views.push(view); draw(true); };
      const label = (names, [from, to]) => {
        if (names === spec.columns.name && spec.columns.range) return spec.columns.range(from, to);
        if (names === spec.rows.name && spec.rows.range) return spec.rows.range(from, to);
        const first = names(from), last = names(to - 1), stem = first.replace(/\d+$/, "");
        if (to - from < 2) return first;
        return stem.endsWith(" ") && last.startsWith(stem) ? `${first}–${last.slice(stem.length)}` : `${first} – ${last}`;
      };
      const head = (names, group, view, tall) => {
        const text = label(names, group);
        if (!text) return make("td");
        const inner = group[1] - group[0] > 1 ? button(text, open(view)) : make("span", { text });
        return make("th", { scope: tall ? "col" : "row", class: tall ? "tall" : null }, inner);
      };
      const tips = new Map();
      const table = make("table", { class: "heat", role: "grid", "aria-label": spec.label });
      const first = make("tr", {}, spec.corner ? make("th", { scope: "col", text: spec.corner }) : make("td"));
      for (const group of columns) first.append(head(spec.columns.name, group, [top, bottom, ...group], true));
      table.append(make("thead", {}, first));
      const body = make("tbody");
      for (const row of rows) {
        const line = make("tr", {}, head(spec.rows.name, row, [...row, left, right], false));
        for (const column of columns) {
          const found = spec.cell(row[0], row[1], column[0], column[1]);
          const names = [label(spec.rows.name, row), label(spec.columns.name, column)].filter(Boolean).join(", ");
          const tip = `${names}: ${found.tip}`;
          const cell = make("td", { class: [found.odd && "odd", found.none && "none", found.unread && "unread"].filter(Boolean).join(" ") || null,
            tabindex: "-1", "aria-label": tip, id: found.id, text: found.text || "" });
          cell.style.setProperty("--p", found.heat || 0);
          const grows = row[1] - row[0] > 1 || column[1] - column[0] > 1;
          tips.set(cell, [tip, grows ? open([...row, ...column]) : found.press]);
          line.append(cell);
        }
        body.append(line);
      }
      table.append(body);
      const cells = [...tips.keys()];
      if (cells.length) cells[0].tabIndex = 0;
      const tell = event => { const found = tips.get(event.target.closest("td")); if (found) readout.textContent = found[0]; };
      table.addEventListener("mouseover", tell);
      table.addEventListener("focusin", tell);
      table.addEventListener("click", event => {
        tell(event);
        const found = tips.get(event.target.closest("td"));
        if (found && found[1]) found[1]();
      });
      table.addEventListener("keydown", event => {
        const here = event.target.closest("td"), at = cells.indexOf(here);
        if (at < 0) return;
        const wide = columns.length;
        const to = { ArrowLeft: at % wide ? at - 1 : at, ArrowRight: (at + 1) % wide ? at + 1 : at, ArrowUp: at - wide,
          ArrowDown: at + wide, Home: at - at % wide, End: at - at % wide + wide - 1 }[event.key];
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); here.click(); }
        else if (cells[to]) {
          event.preventDefault();
          here.tabIndex = -1;
          cells[to].tabIndex = 0;
          cells[to].focus();
        }
      });
      frame.replaceChildren(table);
      trail.replaceChildren();
      if (views.length > 1) {
        trail.append(button("← all", () => { views.length = 1; draw(true); }));
        if (views.length > 2) trail.append(button("← back", () => { views.pop(); draw(true); }));
      }
      if (moveFocus) cells[0].focus();
    };
    draw(false);
    let width = host.clientWidth;
    addEventListener("resize", () => { if (host.clientWidth !== width) { width = host.clientWidth; draw(false); } });
  };

  // Rectangles whose areas are as the sizes, as square as they come (Bruls, Huizing and van Wijk, 2000).
  const squarify = (sizes, width, height) => {
    const whole = sizes.reduce((sum, each) => sum + each, 0), placed = [];
    let x = 0, y = 0, w = width, h = height, at = 0;
    const areas = sizes.map(each => each / whole * width * height);
    const ratio = (row, side) => {
      const sum = row.reduce((all, each) => all + each, 0), thick = sum / side;
      return Math.max(...row.map(each => { const long = each / thick; return Math.max(long / thick, thick / long); }));
    };
    while (at < areas.length) {
      const side = Math.min(w, h) || 1e-9, row = [areas[at]];
      while (at + row.length < areas.length && ratio([...row, areas[at + row.length]], side) <= ratio(row, side))
        row.push(areas[at + row.length]);
      const thick = row.reduce((all, each) => all + each, 0) / side;
      let run = 0;
      for (const area of row) {
        const long = area / thick;
        placed.push(w >= h ? [x, y + run, thick, long] : [x + run, y, long, thick]);
        run += long;
      }
      if (w >= h) { x += thick; w -= thick; } else { y += thick; h -= thick; }
      at += row.length;
    }
    return placed;
  };

  // Repeated layers as one: neighbours with the same parts.
  const alike = new Map();
  const sign = node => isLeaf(node) ? `${node[2]}[${node[3]}]` : `(${node[2].map(each => each[0] + sign(each))})`;
  const fold = node => {
    if (isLeaf(node)) return node;
    const runs = [];
    const isNumber = each => /^\d+(\.|$)/.test(each[0]) && !isLeaf(each), tail = each => each[0].replace(/^\d+/, "");
    node[2].sort((a, b) => isNumber(a) && isNumber(b) ? parseInt(a[0], 10) - parseInt(b[0], 10) : 0);
    for (const each of node[2]) {
      const run = runs[runs.length - 1], same = isNumber(each) && tail(each) + sign(each);
      if (run && same && run.same === same) run.push(each); else runs.push(Object.assign([each], { same }));
    }
    node[2] = runs.flatMap(run => {
      if (run.length < 3) return run.map(fold);
      const group = [`${parseInt(run[0][0], 10)}–${run[run.length - 1][0]} × ${run.length}`, run.reduce((sum, each) => sum + each[1], 0), run.map(fold),
        run.reduce((sum, each) => sum + each[3], 0)];
      alike.set(group, run.length);
      return [group];
    });
    return node;
  };
  const isLost = node => isLeaf(node) ? lostFiles.has(node[5]) : lostFiles.size > 0 && node[2].some(isLost);

  const MOST_TILES = 140, MOST_ROWS = 40;
  const modules = host => {
    const trail = make("nav", { class: "trail", "aria-label": "Where in the model" });
    const map = make("div", { class: "treemap", role: "group", "aria-label": "Modules by bytes" });
    const level = make("div", { class: "level" }), tensor = make("div", { "aria-live": "polite" });
    host.append(trail, map, level, tensor);
    const path = [fold(data.tree)];
    let isTable = false;
    const here = () => path[path.length - 1];
    const nameOf = nodes => nodes.slice(1).filter(node => !alike.has(node)).map(node => node[0]).join(".") || "everything";
    const hueOf = name => {
      let sum = 7;
      for (const char of name.replace(/\d+/g, "")) sum = (sum * 31 + char.codePointAt(0)) % 9973;
      return sum % 10;
    };
    const tensors = node => isLeaf(node) ? 1 : node[3];
    const go = (node, focus) => {
      if (isLeaf(node)) { show(node, focus); return; }
      path.push(node);
      draw(focus);
      if (node[2].length === 1) go(node[2][0], focus);
    };
    const describe = node => isLeaf(node) ? `${data.dtypes[node[2]]} [${node[3].join(", ")}]` : count(tensors(node), "tensor")
      + (alike.has(node) ? `, alike in each of ${alike.get(node)}` : "");
    // A tile for every part that is large enough to point at, and in a large one those of its own parts.
    const lay = (node, [x, y, w, h], depth, route, tiles, times = 1) => {
      const weighty = node[2].filter(each => total(each) > 0).sort((a, b) => total(b) - total(a));
      const area = w * h / total(node);
      const shown = weighty.slice(0, MOST_TILES).filter(each => total(each) * area > 250);
      const rest = weighty.slice(shown.length), left = rest.reduce((sum, each) => sum + total(each), 0);
      const entries = shown.map(each => [total(each), each]);
      if (left) entries.push([left, null]);
      const places = squarify(entries.map(each => each[0]), w, h);
      entries.forEach(([bytes, each], i) => {
        const [dx, dy, wide, high] = places[i], inner = each && !isLeaf(each) && wide > 90 && high > 60 && depth < (times > 1 || alike.has(each) ? 4 : 2) && tiles.length < 300;
        tiles.push({ name: each ? each[0] : `${rest.length} more`, bytes, each, times, depth, route, hidden: inner,
          place: [x + dx, y + dy, wide, high] });
        const first = alike.has(each) && each[2][0], within = first ? [...route, each, first] : [...route, each];
        if (inner) lay(first || each, [x + dx + 4, y + dy + 22, wide - 8, high - 26], depth + 1, within, tiles, first ? alike.get(each) : times);
      });
    };
    const draw = (focus, all = false) => {
      const node = here(), children = [...node[2]].sort((a, b) => total(b) - total(a));
      trail.replaceChildren(...path.map((each, depth) => depth === path.length - 1
        ? make("span", { "aria-current": "true", text: depth ? each[0] : "everything" })
        : button(depth ? each[0] : "everything", () => { path.length = depth + 1; draw(true); })));
      trail.append(make("span", { class: "dim", text: `${size(total(node))}, ${count(tensors(node), "tensor")}` }));
      const width = map.clientWidth || 800, height = map.clientHeight || 400, tiles = [];
      lay(node, [0, 0, width, height], 0, [], tiles);
      map.replaceChildren(...tiles.map(({ name, bytes, each, times, place: [x, y, w, h], depth, route, hidden }) => {
        const lost = each && isLost(each), what = (each ? `, ${describe(each)}` : "") + (lost ? ", in a missing file: not read" : "");
        const much = times > 1 ? `${size(bytes)} in each` : `${size(bytes)} · ${share(bytes, total(node))}`;
        const tile = make("button", { type: "button", class: `tile hue-${hueOf(name)}${lost ? " unread" : ""}`, title: `${name}, ${much}${what}`,
          tabindex: depth ? "-1" : null });
        const seen = (wanted, tag) => wanted ? { tag } : { tag: "span", class: "hidden" };
        const named = seen(w > 36 && h > 18, "b"), sized = seen(w > 50 && h > 40 && !hidden, "span");
        tile.append(make(named.tag, { class: named.class, text: name }), " ", make(sized.tag, { class: sized.class, text: much }),
          make("span", { class: "hidden", text: what }));
        Object.assign(tile.style, { left: `${100 * x / width}%`, top: `${100 * y / height}%`,
          width: `${100 * w / width}%`, height: `${100 * h / height}%` });
        tile.addEventListener("click", () => {
          path.push(...route);
          if (each) go(each, true); else { draw(false, true); focusLevel(0); }
        });
        return tile;
      }));
      const rows = all ? children : children.slice(0, MOST_ROWS);
      const table = make("table", {}, make("caption", { text: `Parts of ${nameOf(path)}` }));
      const heads = ["part", "bytes", "share", "what"];
      table.append(make("thead", {}, make("tr", {}, ...heads.map((text, i) => make("th", { scope: "col", class: i % 3 ? "r" : null, text })))));
      table.append(make("tbody", {}, ...rows.map(each => make("tr", {},
        make("th", { scope: "row" }, button(each[0], () => go(each, true))),
        make("td", { class: "r", text: size(total(each)) }), make("td", { class: "r", text: share(total(each), total(node)) }),
        make("td", { text: describe(each) })))));
      const frame = make("div", { class: "scroll" }, table);
      const folded = make("details", {}, make("summary", { text: `As a table: ${count(children.length, "part")}` }), frame);
      isTable = isTable || all;
      folded.open = isTable;
      folded.addEventListener("toggle", () => { isTable = folded.open; });
      level.replaceChildren(folded);
      if (rows.length < children.length)
        frame.append(button(`Show all ${children.length.toLocaleString("en")}`, () => { draw(false, true); focusLevel(MOST_ROWS); }, { class: "more" }));
      tensor.replaceChildren();
      if (focus) (map.querySelector("button") || trail.querySelector("button")).focus();
    };
    const focusLevel = row => { const found = level.querySelectorAll("tbody button"); if (found.length) found[Math.min(row, found.length - 1)].focus(); };
    const show = (leaf, focus) => {
      const heading = make("h3", { tabindex: "-1", text: nameOf([...path, leaf]) });
      const panel = make("div", { class: "tensor" }, heading);
      panel.append(make("p", { text: `${data.dtypes[leaf[2]]} [${leaf[3].join(", ")}], ${size(leaf[1])}` }));
      const side = make("div", { class: "side" });
      panel.append(side);
      tensor.replaceChildren(panel);
      leaf[4].forEach((place, number) => {
        const layout = data.layouts[number], box = make("div");
        side.append(box);
        if (place === null) { box.append(make("p", { text: `${layout.name}: no tensor of this name` })); return; }
        box.append(make("p", { text: (data.layouts.length > 1 ? `${layout.name}: ` : "") + layout.patterns[place].placed }));
        if (leaf[5] != null && number === 0) box.append(make("p", { class: "where", text: data.files[leaf[5]] }));
        chunks(box, layout.patterns[place], leaf[3], nameOf([...path, leaf]));
      });
      if (focus) { heading.focus(); heading.scrollIntoView({ block: "nearest" }); }
    };
    map.addEventListener("keydown", event => { if (event.key === "Escape" && path.length > 1) { path.pop(); draw(true); } });
    draw(false);
    let width = map.clientWidth;
    addEventListener("resize", () => {
      if (map.clientWidth === width) return;
      width = map.clientWidth;
      const open = tensor.firstChild;
      draw(false);
      if (open) tensor.append(open);
    });
  };

  const chunks = (host, pattern, shape, name) => {
    const tell = text => host.append(make("p", { class: "dim", text }));
    if (pattern.empty) tell(`${count(pattern.empty, "chunk")} without elements`);
    if (pattern.boxes) {
      tell(`${count(pattern.num, "chunk")}, not a grid${pattern.num > pattern.boxes.length ? `; the first ${pattern.boxes.length} are listed` : ""}`);
      const table = make("table", {}, make("thead", {}, make("tr", {}, ...["rank", "offsets", "sizes"].map(text => make("th", { scope: "col", text })))));
      table.append(make("tbody", {}, ...pattern.boxes.map(([rank, offsets, sizes]) => make("tr", {},
        make("th", { scope: "row", text: rank < 0 ? "not in the file's name" : String(rank) }),
        make("td", { text: `[${offsets.join(", ")}]` }), make("td", { text: `[${sizes.join(", ")}]` })))));
      host.append(make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": `Chunks of ${name}` }, table));
      return;
    }
    const starts = pattern.starts.map(expand), ranks = expand(pattern.ranks), copies = pattern.copies || {};
    if (!ranks.length) return;
    const cut = starts.map((each, dim) => dim).filter(dim => starts[dim].length > 1);
    if (!cut.length) {
      tell(ranks[0] >= 0 ? `one chunk, in the file of rank ${[ranks[0], ...(copies[0] || [])].join(" and ")}` : ranks[0] === NOBODY ? "no chunk holds it" : "one chunk");
      return;
    }
    if (cut.length > 2) { tell(`cut along ${cut.length} dims into ${ranks.length} chunks: no drawing; ckpt inspect --tensor lists them`); return; }
    const columnDim = cut[cut.length - 1], rowDim = cut.length > 1 ? cut[0] : null;
    const span = dim => (from, to) => `${starts[dim][from]}:${to < starts[dim].length ? starts[dim][to] : shape[dim]}`;
    const along = dim => ({ length: starts[dim].length, name: at => span(dim)(at, at + 1), range: span(dim) });
    const wide = starts[columnDim].length, most = Math.max(1, ...ranks);
    const drawn = make("div");
    host.append(drawn);
    matrix(drawn, {
      label: `Chunks of ${name}`, corner: rowDim === null ? `dim ${columnDim}` : `dim ${rowDim} \\ dim ${columnDim}`, cellWidth: 34,
      help: "Numbers are the ranks in whose files the chunks lie. Point at a chunk, or use the arrow keys.",
      rows: rowDim === null ? { length: 1, name: () => "" } : along(rowDim), columns: along(columnDim),
      cell: (r0, r1, c0, c1) => {
        const held = [];
        let holes = 0;
        for (let r = r0; r < r1; r++) for (let c = c0; c < c1; c++) {
          const at = r * wide + c;
          if (ranks[at] === NOBODY) holes++;
          else held.push(ranks[at], ...(copies[at] || []));
        }
        if (holes) return { none: !held.length, odd: true, text: "?", tip: `${count(holes, "chunk")} missing` };
        const known = held.filter(rank => rank !== UNKNOWN);
        if (!known.length) return { heat: .4, tip: "stored; the file's name has no rank" };
        const low = Math.min(...known), high = Math.max(...known);
        if (known.some(rank => lostRanks.has(rank))) return { unread: true, text: "not read", tip: `ranks ${low} to ${high}: a file is missing, not read` };
        return { heat: .15 + .7 * low / most, text: held.length === 1 ? String(low) : held.length < 3 ? held.join("+") : "",
          tip: held.length === 1 ? `rank ${low}` : `${count(held.length, "chunk")}, ranks ${low} to ${high}` };
      },
    });
  };

  const heat = (host, layout) => {
    const isStored = layout === data.layouts[0], ranks = expand(layout.ranks), rows = layout.rows.map(([name, blocks, runs]) => [name, blocks, expand(runs)]);
    const heats = rows.map(row => scale(row[2]));
    matrix(host, {
      label: "Bytes by module and rank", corner: "rank",
      help: "A row's color goes up to its usual most; ▲ and ▼ mark ranks far outside. A frame marks ranks or modules that differ within a cell. Hatched: not read.",
      rows: { length: rows.length, name: at => rows[at][0] + (rows[at][1] > 1 ? ` × ${rows[at][1]}` : "") },
      columns: { length: ranks.length, name: at => String(ranks[at]) },
      cell: (r0, r1, c0, c1) => {
        let low = Infinity, high = 0, sum = 0, uneven = false, unread = false;
        const warm = { heat: 0, sign: "" };
        for (let r = r0; r < r1; r++) {
          let rowLow = Infinity, rowHigh = 0;
          for (let c = c0; c < c1; c++) {
            const value = rows[r][2][c];
            sum += value;
            rowLow = Math.min(rowLow, value);
            rowHigh = Math.max(rowHigh, value);
            unread = unread || isStored && lostRanks.has(ranks[c]);
          }
          low = Math.min(low, rowLow);
          high = Math.max(high, rowHigh);
          const most = heats[r](rowHigh), least = heats[r](rowLow);
          warm.heat = Math.max(warm.heat, most.heat);
          warm.sign = warm.sign || most.sign || least.sign;
          uneven = uneven || rowLow !== rowHigh;
        }
        const each = r1 - r0 === 1 && rows[r0][1] > 1 ? " in each" : "";
        return { heat: warm.heat, odd: uneven, none: !high, unread, text: warm.sign,
          tip: (unread ? "not read: a file is missing; " : "") + (low === high ? `${size(high)}${each}` : `${size(low)} to ${size(high)} (${size(sum)} together)`) };
      },
    });
  };

  const mesh = (host, layout) => {
    const axes = layout.mesh, inner = axes[axes.length - 1], outer = axes.slice(0, -1);
    const rowCount = outer.reduce((product, axis) => product * axis[1], 1);
    const ranks = expand(layout.ranks), held = expand(layout.bytes), bytes = new Map(ranks.map((rank, i) => [rank, held[i]]));
    const warm = scale(held), isStored = layout === data.layouts[0];
    const rowName = row => {
      const parts = [];
      for (const [name, length] of [...outer].reverse()) { parts.unshift(`${name} ${row % length}`); row = Math.floor(row / length); }
      return parts.join(", ");
    };
    matrix(host, {
      label: "Mesh", corner: "", cellWidth: 40, help: "Numbers are ranks; the stronger the color, the more bytes lie in a rank's files; ▲ and ▼ mark those far outside. Hatched: a file is missing, not read. Point at a rank, or use the arrow keys.",
      rows: { length: rowCount, name: rowName }, columns: { length: inner[1], name: at => `${inner[0]} ${at}` },
      cell: (r0, r1, c0, c1) => {
        let low = Infinity, high = 0, first = null, last = null, lost = null;
        for (let r = r0; r < r1; r++) for (let c = c0; c < c1; c++) {
          const rank = r * inner[1] + c, value = bytes.get(rank) || 0;
          if (first === null) first = rank;
          last = rank;
          if (isStored && lostRanks.has(rank)) lost = rank;
          low = Math.min(low, value);
          high = Math.max(high, value);
        }
        const text = first === last ? `rank ${first}, ` : `ranks ${first} to ${last}, `;
        const { heat, sign } = warm(high);
        return { heat, odd: low !== high, none: !high, unread: lost !== null, id: lost === null ? null : `rank-${lost}`,
          press: lost === null ? null : () => visit(`finding-${lostRanks.get(lost)}`),
          text: first === last ? (lost === null ? sign : "! ") + first : lost === null ? sign : "!",
          tip: text + (lost === null ? "" : "a file is missing, not read; ") + (high ? low === high ? `${size(high)} in its files` : `${size(low)} to ${size(high)} in the files of each` : "nothing in its files") };
      },
    });
  };

  // A line per kind of weight over the layers; what has no number is marked below, each reason in a lane of its own.
  const GLYPHS = { "NaN or Inf": "✕", "exactly 0": "0", equal: "○", unchanged: "○", "not read": "▨", "not measured": "▨" };
  const SVG = document.createRange().createContextualFragment("<svg></svg>").firstChild.namespaceURI;  // no address in this file
  const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
  const draw = (tag, traits, ...children) => {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(traits)) if (value != null) made.setAttribute(name, value);
    made.append(...children);
    return made;
  };
  const say = number => number && (Math.abs(number) < 1e-4 || Math.abs(number) >= 1e6) ? number.toExponential(1).replace("+", "").replace(".0e", "e") : number.toLocaleString("en", { maximumSignificantDigits: 3 });
  const depth = (host, number) => {
    const { along, kinds, rows, pins: named, left_out: [numLayers, numKinds] } = data.depths[number], shown = new Set(kinds.keys());
    const layers = [...new Set(rows.map(row => row[1]))].sort((a, b) => a - b), at = new Map(layers.map((layer, i) => [layer, i]));
    const pins = named.filter(pin => pin[0] < kinds.length).map(([k, layer, ...rest]) => [k, at.get(layer), ...rest]);
    // Of several tensors in a place (experts) the largest number, and every word with how many have it.
    const measures = data.depths[number].measures.map((name, m) => {
      const lines = kinds.map(() => layers.map(() => null)), odd = new Map();
      for (const row of rows) {
        const [k, i, value] = [row[0], at.get(row[1]), row[2 + m]], word = value === 0 ? "exactly 0" : value;
        if (typeof word === "string") odd.set(`${k} ${i} ${word}`, [k, i, word, (odd.get(`${k} ${i} ${word}`) || [0, 0, 0, 0])[3] + 1]);
        else if (value !== null) lines[k][i] = Math.max(lines[k][i] ?? -Infinity, value);
      }
      return [name, lines, [...odd.values()]];
    });
    let which = 0, here = [0, 0];
    const controls = make("div", { class: "legend", role: "group", "aria-label": "Measures" });
    const legend = make("div", { class: "legend", role: "group", "aria-label": "Lines" });
    const frame = make("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `Chart: arrow keys go from ${along} to ${along} and from line to line` });
    const readout = make("p", { class: "readout dim", "aria-live": "polite", text: "Point at a line, or use the arrow keys." });
    const key = make("p", { class: "dim" });
    const press = (target, isOn) => target.setAttribute("aria-pressed", isOn);
    if (measures.length > 1) controls.append(...measures.map(([name], i) => button(name, () => { which = i; redraw(); }, { class: "more" })));
    legend.append(...kinds.map((name, k) => button("", () => { shown.has(k) ? shown.delete(k) : shown.add(k); redraw(); }, { class: `more hue-${k % 10}` })));
    kinds.forEach((name, k) => legend.children[k].append(draw("svg", { width: 26, height: 10, "aria-hidden": "true" },
      draw("line", { x1: 0, x2: 26, y1: 5, y2: 5, "stroke-dasharray": DASHES[k % 4] })), ` ${name}`));
    if (kinds.length > 2) legend.append(button("all or none", () => { const all = shown.size === kinds.length; kinds.forEach((_, k) => all ? shown.delete(k) : shown.add(k)); redraw(); }, { class: "more" }));
    host.append(controls, legend, frame, readout, key);
    const oddAt = (k, i) => measures[which][2].filter(each => (k === null ? shown.has(each[0]) : each[0] === k) && each[1] === i);
    const tell = () => {
      const [k, i] = here, value = measures[which][1][k][i], odd = oddAt(k, i).map(each => each[2] + (each[3] > 1 ? ` × ${each[3]}` : ""));
      const found = pins.filter(pin => pin[0] === k && pin[1] === i).map(pin => pin[3]);
      readout.textContent = [`${along} ${layers[i]}, ${kinds[k]}: ${[value === null ? [] : say(value), ...odd].flat().join(", ") || "nothing there"}`, ...found].join(" · ");
    };
    const redraw = () => {
      [...controls.children].forEach((each, i) => press(each, i === which));
      kinds.forEach((_, k) => press(legend.children[k], shown.has(k)));
      const width = Math.max(280, frame.clientWidth), left = 58, right = width - 14, [, lines, odd] = measures[which];
      const values = lines.flatMap((line, k) => shown.has(k) ? line.filter(each => each !== null) : []);
      let low = values.reduce((a, b) => Math.min(a, b), Infinity), top = values.reduce((a, b) => Math.max(a, b), -Infinity);
      const isLog = low > 0 && top > 30 * low;
      const high = values.length ? 240 : 10;  // without a number there are lanes alone
      if (!values.length) [low, top] = [0, 0];
      else if (!isLog && low > 0 && low < top / 2) low = 0;
      const to = isLog ? Math.log : each => each, span = to(top) - to(low) || Math.abs(to(top)) || 1;
      const words = [...new Set(odd.filter(each => shown.has(each[0])).map(each => each[2]))];
      const gap = (right - left) / Math.max(1, layers.length - 1), x = i => layers.length > 1 ? left + 4 + i * (right - left - 8) / (layers.length - 1) : (left + right) / 2;
      const y = value => 10 + (high - 20) * (1 - (to(value) - to(low)) / span), lane = word => high + 12 + 20 * words.indexOf(word);
      const ticks = [];
      if (isLog) {
        const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(top)), step = Math.ceil((last - first) / 8);
        for (let power = first; power <= last; power += step) for (const by of last - first < 3 ? [1, 2, 5] : [1]) ticks.push(by * 10 ** power);
      } else if (values.length) {
        const rough = (top - low || top || 1) / 4, unit = 10 ** Math.floor(Math.log10(rough)), step = unit * [1, 2, 5, 10].find(by => by * unit >= rough);
        for (let at = Math.ceil(low / step); at * step <= top * 1.0001; at++) ticks.push(at * step);
      }
      const below = high + 20 * words.length, svg = draw("svg", { viewBox: `0 0 ${width} ${below + 34}`, "aria-label": host.firstElementChild.textContent, role: "group" });
      for (const each of ticks.filter(each => each >= low * .999 && each <= top * 1.001)) svg.append(draw("path", { class: "grid", d: `M${left} ${y(each)}H${right}` }),
        draw("text", { x: left - 6, y: y(each) + 4, "text-anchor": "end" }, say(each)));
      for (let i = 0, step = Math.ceil(layers.length * 38 / (right - left)); i < layers.length; i += step)
        svg.append(draw("text", { x: x(i), y: below + 18, "text-anchor": "middle" }, String(layers[i])));
      svg.append(draw("text", { x: left - 6, y: below + 18, "text-anchor": "end" }, along));
      words.forEach(word => svg.append(draw("path", { class: "grid", d: `M${left} ${lane(word)}H${right}` }),
        draw("text", { x: left - 6, y: lane(word) + 4, "text-anchor": "end" }, GLYPHS[word] || "≠")));
      lines.forEach((line, k) => {
        if (!shown.has(k)) return;
        const place = line.map((value, i) => value === null ? null : `${x(i).toFixed(1)},${y(value).toFixed(1)}`);
        const d = place.map((at, i) => at === null ? "" : `${i && place[i - 1] !== null ? "L" : "M"}${at}${place[i + 1] == null && !(i && place[i - 1] !== null) ? "h.1" : ""}`).join("");
        svg.append(draw("path", { class: `hue-${k % 10} line`, "stroke-dasharray": DASHES[k % 4], d }));
        if (gap > 9) svg.append(draw("path", { class: `hue-${k % 10} dots`, d: place.map(at => at === null ? "" : `M${at}h.01`).join("") }));
      });
      const marked = new Set(odd.filter(each => shown.has(each[0])).map(each => `${each[1]} ${each[2]}`));
      for (const each of marked) {
        const [i, word] = [parseInt(each, 10), each.slice(each.indexOf(" ") + 1)];
        svg.append(draw("text", { class: "glyph", x: x(i), y: lane(word) + 5, "text-anchor": "middle" }, GLYPHS[word] || "≠"));
      }
      const cursor = draw("path", { class: "cursor" });
      svg.append(cursor);
      for (const [k, i, to, what] of pins) if (shown.has(k)) {
        const value = lines[k][i], reason = oddAt(k, i)[0], at = value !== null ? y(value) : reason ? lane(reason[2]) : high;
        const tip = `${along} ${layers[i]}, ${kinds[k]}: ${what}`;
        svg.append(draw("a", { id: `depth-${number}-${to}`, href: to && `#finding-${to}`, tabindex: "0", "data-tip": tip, "aria-label": tip },
          draw("circle", { cx: x(i), cy: at, r: 9 }), draw("text", { x: x(i), y: at + 4.5, "text-anchor": "middle" }, "!")));
      }
      frame.onpointermove = event => {
        const box = svg.getBoundingClientRect(), px = (event.clientX - box.left) * width / box.width, py = (event.clientY - box.top) * width / box.width;
        const i = Math.max(0, Math.min(layers.length - 1, Math.round((px - x(0)) / ((x(layers.length - 1) - x(0)) / (layers.length - 1 || 1) || 1))));
        const near = [...shown].map(k => [lines[k][i] !== null ? Math.abs(y(lines[k][i]) - py) : Math.min(999, ...oddAt(k, i).map(each => Math.abs(lane(each[2]) - py))), k]);
        if (near.length && !event.target.closest("a")) { here = [near.reduce((a, b) => b[0] < a[0] ? b : a)[1], i]; move(); }
      };
      frame.onkeydown = event => {
        const kept = [...shown], turn = { ArrowUp: -1, ArrowDown: 1 }[event.key], go = { ArrowLeft: -1, ArrowRight: 1, Home: -layers.length, End: layers.length }[event.key];
        if (!kept.length || !(turn || go) || event.target !== frame) return;
        event.preventDefault();
        const at = kept.indexOf(here[0]);
        here = [kept[(Math.max(0, at) + (turn || 0) + kept.length) % kept.length], Math.max(0, Math.min(layers.length - 1, here[1] + (go || 0)))];
        move();
      };
      const move = () => { cursor.setAttribute("d", `M${x(here[1])} 4V${below}`); tell(); };
      frame.replaceChildren(svg);
      key.textContent = [isLog ? "Logarithmic scale" : "Linear scale", ...words.map(word => `${GLYPHS[word] || "≠"} ${word}`), along === "layer" ? "gap: no such tensor" : "", pins.length ? "!: a finding" : "",
        numLayers ? `${layers.length} of ${layers.length + numLayers} layers are drawn, those with findings among them` : "",
        numKinds ? `${numKinds} more kinds are not drawn` : ""].filter(Boolean).join(" · ");
    };
    redraw();
    let before = frame.clientWidth;
    addEventListener("resize", () => { if (frame.clientWidth !== before) { before = frame.clientWidth; redraw(); } });
  };

  const visit = id => {
    const target = document.getElementById(id);
    if (!target) return;
    for (let each = target.closest("details"); each; each = each.parentElement.closest("details")) each.open = true;
    target.scrollIntoView({ block: "center" });
    target.focus({ preventScroll: true });
  };
  document.addEventListener("click", event => {
    const link = event.target.closest("a[href^='#']");
    if (link) { event.preventDefault(); visit(link.getAttribute("href").slice(1)); }
  });
  for (const kind of ["mouseover", "focusin"]) document.addEventListener(kind, event => {
    const marked = event.target.closest("[data-tip]"), readout = marked && marked.closest("figure").querySelector(".readout");
    if (readout) readout.textContent = marked.dataset.tip;
  });
  for (const [rank, number] of lostRanks) {
    const item = rank !== null && document.getElementById(`finding-${number}`);
    if (item) item.append(make("p", { class: "back" }, make("a", { href: `#rank-${rank}`, text: `on the mesh: rank ${rank}` })));
  }
  let numDepths = 0;
  const drawers = { modules: host => modules(host), heat: (host, layout) => heat(host, layout), mesh: (host, layout) => mesh(host, layout),
    depth: host => depth(host, numDepths++) };
  for (const host of document.querySelectorAll("[data-draws]"))
    drawers[host.dataset.draws](host, data.layouts && data.layouts[Number(host.dataset.layout)]);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(each => { each.open = true; }));
})();
