// The speed-up of a chain by formula and by a measured cost curve, on the theory page.
(function () {
  const WIDTH = 640, HEIGHT = 300, LEFT = 44, BOTTOM = 34, MOST = 16;

  function expected(alpha, k) { // tokens of a step: (1 - alpha^(k+1)) / (1 - alpha)
    return alpha === 1 ? k + 1 : (1 - Math.pow(alpha, k + 1)) / (1 - alpha);
  }

  function forward(curve, rows) { // over one row, linear between measured numbers of rows
    if (!curve) return 1;
    const last = curve.rows.length - 1;
    for (let i = 1; i <= last; i++) {
      if (rows <= curve.rows[i] || i === last) {
        const share = (rows - curve.rows[i - 1]) / (curve.rows[i] - curve.rows[i - 1]);
        return (curve.seconds[i - 1] + share * (curve.seconds[i] - curve.seconds[i - 1])) / curve.seconds[0];
      }
    }
    return 1;
  }

  function speedup(alpha, cost, k, curve) {
    return expected(alpha, k) / (forward(curve, k + 1) + k * cost);
  }

  function line(values, x, y, style) {
    const points = values.map((value, k) => `${x(k).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    return `<polyline points="${points}" fill="none" ${style} stroke-width="2"/>`;
  }

  function draw(box, curves) {
    const read = (name) => Number(box.querySelector(`[name=${name}]`).value);
    const alpha = read("alpha"), cost = read("cost"), k = read("k"), chosen = read("curve");
    box.querySelectorAll("output").forEach((out) => { out.value = box.querySelector(`[name=${out.htmlFor}]`).value; });
    const ks = [...Array(MOST + 1).keys()];
    const formula = ks.map((each) => speedup(alpha, cost, each, null));
    const measured = ks.map((each) => speedup(alpha, cost, each, curves[chosen]));
    const top = Math.max(2, Math.ceil(2 * Math.max(...formula, ...measured)) / 2);
    const x = (each) => LEFT + (each / MOST) * (WIDTH - LEFT - 12);
    const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - BOTTOM - 12);
    const rules = [];
    for (let value = 0; value <= top; value += top > 6 ? 2 : 0.5) {
      rules.push(`<line x1="${LEFT}" x2="${WIDTH - 12}" y1="${y(value)}" y2="${y(value)}" stroke="currentColor" opacity="${value === 1 ? 0.6 : 0.15}"/>`);
      rules.push(`<text x="${LEFT - 8}" y="${y(value) + 4}" text-anchor="end">${value}</text>`);
    }
    for (let each = 0; each <= MOST; each += 2) rules.push(`<text x="${x(each)}" y="${HEIGHT - 14}" text-anchor="middle">${each}</text>`);
    const dot = (value, style) => `<circle cx="${x(k)}" cy="${y(value)}" r="5" ${style}/>`;
    box.querySelector("svg").innerHTML = rules.join("")
      + line(formula, x, y, 'stroke="#5c6bc0"') + line(measured, x, y, 'stroke="#ef6c00"')
      + dot(formula[k], 'fill="#5c6bc0"') + dot(measured[k], 'fill="#ef6c00"')
      + `<text x="${WIDTH - 12}" y="${HEIGHT - 1}" text-anchor="end">drafted tokens, K</text>`;
    const best = measured.indexOf(Math.max(...measured));
    box.querySelector("p.says").textContent = `K = ${k}: ${expected(alpha, k).toFixed(2)} tokens per step; speed-up `
      + `${formula[k].toFixed(2)} by formula, ${measured[k].toFixed(2)} with measured forwards (best K there: ${best}, `
      + `${measured[best].toFixed(2)}).`;
  }

  function slider(name, label, low, high, step, value) {
    return `<label>${label} <output for="${name}">${value}</output><br>`
      + `<input type="range" name="${name}" min="${low}" max="${high}" step="${step}" value="${value}"></label>`;
  }

  document.addEventListener("DOMContentLoaded", () => {
    const box = document.getElementById("speedup"), curves = window.foredraftCosts || [];
    if (!box || !curves.length) return;
    const options = curves.map((curve, i) => `<option value="${i}">${curve.name}</option>`).join("");
    box.innerHTML = `<div class="sliders">${slider("alpha", "acceptance rate, alpha", 0, 1, 0.01, 0.75)}`
      + `${slider("cost", "cost of a drafted token, c", 0, 0.5, 0.01, 0.05)}${slider("k", "drafted tokens, K", 0, MOST, 1, 5)}`
      + `<label>measured forwards<br><select name="curve">${options}</select></label></div>`
      + `<svg viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" aria-label="Speed-up by drafted tokens"></svg>`
      + `<p class="says"></p><p><span style="color:#5c6bc0">■</span> formula: a forward of K + 1 rows costs as much as one of `
      + `1 row. <span style="color:#ef6c00">■</span> the same with measured forwards.</p>`;
    box.addEventListener("input", () => draw(box, curves));
    draw(box, curves);
  });
})();
