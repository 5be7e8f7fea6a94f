"use strict";
(() => {
  const body = document.body, all = (query, root = document) => [...root.querySelectorAll(query)];
  body.classList.add("scripted");

  for (const choice of all("input[name=x]")) {
    if (choice.checked) body.dataset.x = choice.value; // kept by the browser over a reload
    choice.addEventListener("change", () => { body.dataset.x = choice.value; });
  }

  // --- One run at a time ---
  const runs = all("section.run");
  if (runs.length > 1) {
    const label = document.createElement("label"), select = document.createElement("select");
    label.className = "choose";
    label.append("Shown below: ", select);
    runs.forEach((run, index) => select.add(new Option(run.dataset.name, index)));
    select.addEventListener("change", () => {
      runs.forEach((run, index) => run.classList.toggle("shown", index === Number(select.value)));
    });
    runs[0].before(label);
  }

  // --- Values under the pointer ---
  const tip = document.createElement("div");
  tip.className = "tip";
  body.append(tip);
  const short = (value, percent) => percent ? (100 * value).toPrecision(4) + "%" : Number(value.toPrecision(5)) + "";
  const near = (points, x) => points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
  for (const chart of all("svg.lines")) {
    const [x0, x1] = chart.dataset.x.split(",").map(Number), [y0, y1] = chart.dataset.y.split(",").map(Number);
    const [left, right, bottom, top] = chart.dataset.box.split(",").map(Number);
    chart.addEventListener("pointermove", (event) => {
      const box = chart.getBoundingClientRect();
      const x = (event.clientX - box.left) * chart.viewBox.baseVal.width / box.width;
      const found = new Map();
      for (const line of all("polyline.line", chart)) {
        const points = line.getAttribute("points").split(" ").map((pair) => pair.split(",").map(Number));
        const point = near(points, x), other = found.get(line.dataset.name);
        if (!other || Math.abs(point[0] - x) < Math.abs(other[0] - x)) found.set(line.dataset.name, point);
      }
      if (!found.size || x < left - 6 || x > right + 6) { tip.style.display = "none"; return; }
      tip.replaceChildren(...[...found].map(([name, point]) => {
        const row = document.createElement("div");
        const at = x0 + (point[0] - left) / (right - left) * (x1 - x0);
        const value = y0 + (point[1] - bottom) / (top - bottom) * (y1 - y0);
        row.textContent = `${found.size > 1 ? name + ": " : ""}${short(value, chart.dataset.p === "1")} at ${short(at)}`;
        return row;
      }));
      tip.style.display = "block";
      tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 4) + "px";
      tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4) + "px";
    });
    chart.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  }

  // --- Rollouts ---
  for (const form of all("form.filter")) {
    const list = form.nextElementSibling, items = all(".rollout", list), field = form.elements;
    const number = (item, key) => item.dataset[key] === "" ? NaN : Number(item.dataset[key]);
    const rank = (item, key, sign) => { const v = number(item, key); return Number.isNaN(v) ? Infinity : sign * v; };
    const orders = {step: ["step", -1], old: ["step", 1], reward: ["reward", -1], bad: ["reward", 1], gap: ["gap", -1],
      ratio: ["ratio", -1]};
    const texts = new Map(items.map((item) => [item, all("pre", item).map((p) => p.textContent).join("\n").toLowerCase()]));
    const show = () => {
      const text = field.text.value.toLowerCase(), [key, sign] = orders[field.order.value];
      const low = field.low.value === "" ? -Infinity : Number(field.low.value);
      const high = field.high.value === "" ? Infinity : Number(field.high.value);
      let count = 0;
      for (const item of items) {
        const reward = number(item, "reward");
        const wanted = texts.get(item).includes(text) && (!field.kind.value || item.dataset.kind === field.kind.value) &&
          (low === -Infinity && high === Infinity || reward >= low && reward <= high);
        item.hidden = !wanted;
        count += wanted;
      }
      list.append(...items.sort((a, b) => rank(a, key, sign) - rank(b, key, sign) || 0));
      form.querySelector("output").textContent = `${count} of ${items.length} rollouts`;
    };
    form.addEventListener("input", show);
    form.addEventListener("submit", (event) => event.preventDefault());
    show();
  }

  // Tokens are drawn when their rollout is opened: blue where the policy likes a token more than the reference does.
  for (const holder of all(".tokens")) {
    holder.closest("details").addEventListener("toggle", () => {
      if (holder.childElementCount) return;
      const note = document.createElement("p");
      note.textContent = "log π − log ref of each token, π " + holder.dataset.source +
        ": blue above 0, orange below, full colour from 2 nats on; point at one for its numbers";
      holder.append(note);
      for (const [text, ratio, pi, ref] of JSON.parse(holder.dataset.tokens)) {
        const token = document.createElement("span"), strength = Math.min(1, Math.abs(ratio) / 2);
        token.textContent = text;
        token.title = `${ratio >= 0 ? "+" : ""}${ratio} nats: log π ${pi}, log ref ${ref}`;
        token.style.background = `color-mix(in srgb, var(--c${ratio >= 0 ? 0 : 1}) ${Math.round(70 * strength)}%, transparent)`;
        holder.append(token);
      }
    });
  }
})();
