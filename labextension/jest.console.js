// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

// What a test says on the console as a warning or an error is a fault that somebody overlooked.
let said = [];
for (const level of ['error', 'warn']) {
  console[level] = (...words) => said.push(words.map(String).join(' '));
}

function quiet() {
  const all = said;
  said = [];
  expect(all).toEqual([]);
}

afterEach(quiet);
// What is said while the last test is cleared away.
afterAll(quiet);
