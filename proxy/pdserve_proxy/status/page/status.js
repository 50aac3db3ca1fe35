"use strict";
fetch("status").then((answer) => answer.text()).then((text) => { document.getElementById("report").textContent = text; });
