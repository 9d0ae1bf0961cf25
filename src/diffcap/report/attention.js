"use strict";
// Attention maps as colours over an image. heatmaps.py computes the table of colours. It draws attention.png with Pillow, which
// enlarges a map by the same bicubic interpolation.

const CELL_SIZE = 12; // canvas pixels along a cell of the map

function bytesOf(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

// Weights of four neighbouring values for the position between the second and the third, at the distance t from the second (Catmull-Rom).
function cubic(t) {
  return [
    ((-0.5 * t + 1) * t - 0.5) * t,
    (1.5 * t - 2.5) * t * t + 1,
    ((-1.5 * t + 2) * t + 0.5) * t,
    (0.5 * t - 0.5) * t * t,
  ];
}

// Enlarge a row or column of `count` values CELL_SIZE times; a value belongs to the middle of its cell.
function enlarge(read, count, write) {
  for (let at = 0; at < count * CELL_SIZE; at++) {
    const position = (at + 0.5) / CELL_SIZE - 0.5;
    const first = Math.floor(position);
    const weights = cubic(position - first);
    let sum = 0;
    for (let k = 0; k < 4; k++) sum += weights[k] * read(Math.min(count - 1, Math.max(0, first - 1 + k)));
    write(at, sum);
  }
}

// Paint strengths (rows x columns bytes) on a canvas; `colorTable` holds the RGBA values of the strengths 0 to 255.
function paint(canvas, strengths, rows, columns, colorTable) {
  const width = columns * CELL_SIZE, height = rows * CELL_SIZE;
  canvas.width = width;
  canvas.height = height;
  const wide = new Float32Array(rows * width), full = new Float32Array(height * width);
  for (let row = 0; row < rows; row++) {
    enlarge((x) => strengths[row * columns + x], columns, (x, value) => (wide[row * width + x] = value));
  }
  for (let x = 0; x < width; x++) {
    enlarge((y) => wide[y * width + x], rows, (y, value) => (full[y * width + x] = value));
  }
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  full.forEach((value, at) => {
    const strength = Math.min(255, Math.max(0, Math.round(value)));
    image.data.set(colorTable.subarray(4 * strength, 4 * strength + 4), 4 * at);
  });
  context.putImageData(image, 0, 0);
}

// Draw lines between the positions that a captioner matched; `frames` are the rectangles of both images on the card.
function drawMatches(svg, matches, frames, rows) {
  svg.replaceChildren();
  const maxWeight = Math.max(...matches.map((match) => match[4]));
  for (const [x0, y0, x1, y1, weight, hasCommonShift] of [...matches].sort((a, b) => a[4] - b[4])) {
    const [start, end] = [[x0, y0], [x1, y1]].map(([x, y], side) => [
      frames[side].x + (x / 1000) * frames[side].width,
      frames[side].y + (y / 1000) * frames[side].height,
    ]);
    const bend = ((x0 / 1000 - 0.5) * frames[0].height) / rows; // lines of one row would cover each other
    const group = document.createElementNS("http://www.w3.org/2000/svg", "g");
    group.setAttribute("class", hasCommonShift ? "alike" : "other");
    group.setAttribute("opacity", (0.35 + 0.65 * (weight / maxWeight)).toFixed(2));
    const path = document.createElementNS(group.namespaceURI, "path");
    path.setAttribute("d", `M${start} Q${(start[0] + end[0]) / 2} ${(start[1] + end[1]) / 2 + 2 * bend} ${end}`);
    group.append(path);
    for (const [x, y] of [start, end]) {
      const circle = document.createElementNS(group.namespaceURI, "circle");
      for (const [key, value] of Object.entries({ cx: x, cy: y, r: 3.5 })) circle.setAttribute(key, value);
      group.append(circle);
    }
    svg.append(group);
  }
}
