// Copyright (c) jupyter_gpupool developers.
// Distributed under the terms of the Modified BSD License.

// A test fails if it writes a warning or an error to the console, because such a
// message shows a fault.
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
// Also check the messages of the clean-up after the last test.
afterAll(quiet);
